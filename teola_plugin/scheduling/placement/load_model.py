"""The load of each replica, in seconds of its work. O(1) for each request that is sent or ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from teola_plugin.graph import EngineProfile, PrimitiveKind


@dataclass(slots=True)
class SlidingMean:
    """A mean over a sliding window in constant space.

    It keeps the values of the present half window and of the one before. `half` is in seconds.
    """

    half: float
    era: int = 0
    count: int = 0
    total: float = 0.0
    count_before: int = 0
    total_before: float = 0.0

    def add(self, at: float, value: float) -> None:
        """Add a value that was measured at `at` seconds on the caller's clock."""
        self.roll(at)
        self.count += 1
        self.total += value

    def roll(self, at: float) -> None:
        """Begin the half window that contains `at`, if it is a new one."""
        era = int(at // self.half)
        if era == self.era:
            return
        follows = era == self.era + 1
        self.count_before, self.total_before = (self.count, self.total) if follows else (0, 0.0)
        self.era, self.count, self.total = era, 0, 0.0

    def has_grown(self, at: float, factor: float, min_count: int) -> bool:
        """Return True if the mean is `factor` times that of the half window before, with `min_count` values in both.

        `at`: the present time in seconds. `min_count` keeps a few values from counting as growth.
        """
        self.roll(at)
        if min(self.count, self.count_before) < min_count:
            return False
        return self.total / self.count >= factor * self.total_before / self.count_before


PrefillCost = Callable[[float], float]
"""Returns the seconds to prefill so many tokens that are not cached."""

WINDOW = 180.0
"""Seconds of history that count as load (Preble: three minutes)."""
BALANCE_WINDOW = 30.0
"""Seconds of history that say whether a replica mostly prefills or mostly decodes."""
DEFAULT_TOKEN_S = 0.0001
"""Seconds per token if the profile has none. Then only ratios of costs matter."""


def prefill_cost(profile: EngineProfile) -> PrefillCost:
    return profile.curves.get(PrimitiveKind.PREFILLING) or (lambda tokens: tokens * DEFAULT_TOKEN_S)


@dataclass(slots=True)
class PortionLoad:
    """The part of a replica's load that belongs to one key portion."""

    requests: int = 0
    cost: float = 0.0


@dataclass(slots=True)
class ReplicaLoad:
    """The load of one replica. `prefill` and `requests` are of the window, `running` and `prefilling` of now."""

    name: str
    prefill: float = 0.0
    requests: int = 0
    running: int = 0
    prefilling: float = 0.0
    """Seconds of all prefillings that have not given a first token, `prefillings` of them."""
    prefillings: int = 0
    since: float = 0.0
    """When the first of them may have begun."""
    hits: int = 0
    tokens: int = 0
    """Prompt tokens of the balance window: those found in the cache, and all."""
    shares: dict[int, PortionLoad] = field(default_factory=dict)
    """Loads by key portion."""
    first_token: SlidingMean = field(default_factory=lambda: SlidingMean(WINDOW / 2))

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class SentRequest:
    """A request that a replica has been given."""

    load: ReplicaLoad
    cost: float
    at: float
    first_token: float | None = None


class LoadModel:
    """Load of a replica: what the window's prefillings cost, and the decodings that it still has to do."""

    def __init__(self, decode: float = 0.0, *, window: float = WINDOW, max_history: int = 65_536) -> None:
        self.decode = decode
        """Seconds that a request decodes: a running mean of those seen."""
        self.idle: set[str] = set()
        """Replicas that prefill nothing now."""
        self._decoding_count = 0
        self._window = window
        self._max_history = max_history
        self._loads: dict[str, ReplicaLoad] = {}
        self._sent_requests: dict[str, SentRequest] = {}
        self._history: deque[tuple[float, ReplicaLoad, float, int]] = deque()
        self._balance: deque[tuple[float, ReplicaLoad, int, int]] = deque()

    # ------------------------------------------------------------ replicas

    def add_replica(self, replica: str) -> None:
        """Add a replica without load, which counts as idle. Do nothing for one that is known."""
        if replica not in self._loads:
            self._loads[replica] = ReplicaLoad(replica)
            self.idle.add(replica)

    def forget_replica(self, replica: str) -> None:
        """Remove a replica with all its requests; its history runs out unseen."""
        load = self._loads.pop(replica, None)
        self.idle.discard(replica)
        if load is not None:
            self._sent_requests = {
                name: record_sent for name, record_sent in self._sent_requests.items() if record_sent.load is not load
            }

    def __iter__(self) -> Iterator[tuple[str, ReplicaLoad]]:
        return iter(self._loads.items())

    def __getitem__(self, replica: str) -> ReplicaLoad:
        return self._loads[replica]

    def __contains__(self, replica: str) -> bool:
        """Return True for a replica that takes requests: `E2` ignores cache events of any other."""
        return replica in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, replica: str) -> float:
        """Return L, in seconds.

        L is the load of Preble's cost model: the prefillings of the window, and a mean decoding for each running
        request. Raise KeyError for an unknown replica.
        """
        replica_load = self._loads[replica]
        return replica_load.prefill + replica_load.running * self.decode

    def wait_s(self, replica: str, at: float) -> float:
        """Return the seconds until a full replica may have a free slot: its prefillings or a decoding end.

        While it prefills, or if nothing runs, that is the time of its prefillings; otherwise a mean decoding divided by
        the number of running requests.
        """
        load = self._loads[replica]
        if load.prefillings or not load.running:
            return self.queue_s(replica, at)
        return self.decode / load.running

    def queue_s(self, replica: str, at: float) -> float:
        """Return the seconds of prefilling that a replica still has to do."""
        load = self._loads[replica]
        return max(0.0, load.prefilling - (at - load.since))

    def prefill_share(self, replica: str, at: float) -> float:
        """Return the share, 0 to 1, of the window's known part that a replica spent on prefilling.

        `at`: the present time in seconds. The known part begins with the oldest recorded request, and counts as 1 s at
        least.
        """
        if not self._history:
            return 0.0
        return min(1.0, self._loads[replica].prefill / max(1.0, at - self._history[0][0]))

    # ------------------------------------------------------------ requests

    def record_sent(
        self, at: float, request: str, replica: str, cost: float, *, new: int, tokens: int, key: int
    ) -> None:
        """Record a request to a replica: `cost` seconds of prefilling, for `new` of its `tokens` prompt tokens."""
        load = self._loads[replica]
        load.prefill += cost
        load.requests += 1
        load.running += 1
        if not load.prefillings:
            load.since = at
            self.idle.discard(replica)
        load.prefilling += cost
        load.prefillings += 1
        load.hits += tokens - new
        load.tokens += tokens
        if key:
            share = load.shares.get(key)
            if share is None:
                share = load.shares[key] = PortionLoad()
            share.requests += 1
            share.cost += cost
        self._sent_requests[request] = SentRequest(load, cost, at)
        self._history.append((at, load, cost, key))
        self._balance.append((at, load, tokens - new, tokens))

    def record_prefilled(self, at: float, request: str) -> None:
        """Record that a request gave its first token: its replica prefills it no more, and decodes it."""
        record_sent = self._sent_requests.get(request)
        if record_sent is not None and record_sent.first_token is None:
            record_sent.first_token = record_sent.load.since = at
            self._end_prefilling(record_sent)
            record_sent.load.first_token.add(at, at - record_sent.at)

    def record_ended(self, at: float, request: str) -> None:
        """Take a request out of its replica's running ones, and learn from it how long decodings take."""
        record_sent = self._sent_requests.pop(request, None)
        if record_sent is None:
            return
        record_sent.load.running -= 1
        if record_sent.first_token is None:
            self._end_prefilling(record_sent)
        else:
            self._decoding_count += 1
            self.decode += max(0.05, 1 / self._decoding_count) * (at - record_sent.first_token - self.decode)

    def _end_prefilling(self, record_sent: SentRequest) -> None:
        """Record that a request prefills no more."""
        load = record_sent.load
        load.prefillings -= 1
        load.prefilling = max(0.0, load.prefilling - record_sent.cost) if load.prefillings else 0.0
        if not load.prefillings:
            self.idle.add(load.name)

    def expire(self, at: float) -> None:
        """Forget what is older than the windows. Each request is visited once."""
        history, oldest = self._history, at - self._window
        while history and (history[0][0] < oldest or len(history) > self._max_history):
            _, load, cost, key = history.popleft()
            load.requests -= 1
            load.prefill = max(0.0, load.prefill - cost) if load.requests else 0.0
            if key:
                share = load.shares[key]
                share.requests -= 1
                share.cost -= cost
                if not share.requests:
                    del load.shares[key]
        balance, oldest = self._balance, at - BALANCE_WINDOW
        while balance and (balance[0][0] < oldest or len(balance) > self._max_history):
            _, load, hits, tokens = balance.popleft()
            load.hits -= hits
            load.tokens -= tokens
