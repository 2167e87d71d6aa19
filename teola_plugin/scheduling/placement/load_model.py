"""What each instance has been given lately, in seconds of its work. O(1) for each request that is sent or ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.scheduling.placement.window import SlidingMean

PrefillCost = Callable[[float], float]
"""Seconds to prefill so many tokens that are not cached."""

WINDOW = 180.0
"""Seconds of history that count as load (Preble: three minutes)."""
BALANCE_WINDOW = 30.0
"""Seconds of history that say whether an instance mostly prefills or mostly decodes."""
UNMEASURED = 0.0001
"""Seconds a token where the profile says nothing. Only ratios of costs matter then."""


def prefill_cost(profile: EngineProfile) -> PrefillCost:
    return profile.curves.get(PrimitiveKind.PREFILLING) or (lambda tokens: tokens * UNMEASURED)


@dataclass(slots=True)
class Share:
    """What one key portion has to do with an instance's load."""

    requests: int = 0
    cost: float = 0.0


@dataclass(slots=True)
class InstanceLoad:
    """One instance. `prefill` and `requests` are of the window; `running` and `prefilling` of now."""

    name: str
    prefill: float = 0.0
    requests: int = 0
    running: int = 0
    prefilling: float = 0.0
    """Seconds of prefillings that have not given their first token, `prefillings` of them."""
    prefillings: int = 0
    since: float = 0.0
    """When the first of them may have begun."""
    hits: int = 0
    tokens: int = 0
    """Prompt tokens of the balance window: found in the cache, and in all."""
    shares: dict[int, Share] = field(default_factory=dict)
    """By key portion."""
    first_token: SlidingMean = field(default_factory=lambda: SlidingMean(WINDOW / 2))

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Sent:
    """A request that an instance has."""

    load: InstanceLoad
    cost: float
    at: float
    first_token: float | None = None


class LoadModel:
    """Load of an instance: what the window's prefillings cost, and the decodings that it still has to do."""

    def __init__(self, decode: float = 0.0, *, window: float = WINDOW, most: int = 65_536) -> None:
        self.decode = decode
        """Seconds that a request decodes: a running mean of what was seen."""
        self.idle: set[str] = set()
        """Instances that prefill nothing now."""
        self._decoded = 0
        self._window = window
        self._most = most
        self._loads: dict[str, InstanceLoad] = {}
        self._sent: dict[str, Sent] = {}
        self._history: deque[tuple[float, InstanceLoad, float, int]] = deque()
        self._balance: deque[tuple[float, InstanceLoad, int, int]] = deque()

    # ------------------------------------------------------------ instances

    def up(self, instance: str) -> None:
        if instance not in self._loads:
            self._loads[instance] = InstanceLoad(instance)
            self.idle.add(instance)

    def forget(self, instance: str) -> None:
        """Gone, with all that it had; its history runs out unseen."""
        gone = self._loads.pop(instance, None)
        self.idle.discard(instance)
        if gone is not None:
            self._sent = {name: sent for name, sent in self._sent.items() if sent.load is not gone}

    def __iter__(self) -> Iterator[tuple[str, InstanceLoad]]:
        return iter(self._loads.items())

    def __getitem__(self, instance: str) -> InstanceLoad:
        return self._loads[instance]

    def __contains__(self, instance: str) -> bool:
        return instance in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, instance: str) -> float:
        """L: seconds."""
        found = self._loads[instance]
        return found.prefill + found.running * self.decode

    def wait(self, instance: str, at: float) -> float:
        """Seconds until a full instance may have a free slot: until what it prefills is done, or a decoding ends."""
        found = self._loads[instance]
        if found.prefillings or not found.running:
            return self.line(instance, at)
        return self.decode / found.running

    def line(self, instance: str, at: float) -> float:
        """Seconds of prefilling that an instance still has to do."""
        found = self._loads[instance]
        return max(0.0, found.prefilling - (at - found.since))

    def busy(self, instance: str, at: float) -> float:
        """Share of the window, as far as anything was sent in it, that an instance spent on prefilling: 0 to 1."""
        if not self._history:
            return 0.0
        return min(1.0, self._loads[instance].prefill / max(1.0, at - self._history[0][0]))

    # ------------------------------------------------------------ requests

    def sent(self, at: float, request: str, instance: str, cost: float, *, new: int, tokens: int, key: int) -> None:
        """A request went to an instance: `cost` seconds of prefilling, for `new` of its `tokens` prompt tokens."""
        load = self._loads[instance]
        load.prefill += cost
        load.requests += 1
        load.running += 1
        if not load.prefillings:
            load.since = at
            self.idle.discard(instance)
        load.prefilling += cost
        load.prefillings += 1
        load.hits += tokens - new
        load.tokens += tokens
        if key:
            share = load.shares.get(key)
            if share is None:
                share = load.shares[key] = Share()
            share.requests += 1
            share.cost += cost
        self._sent[request] = Sent(load, cost, at)
        self._history.append((at, load, cost, key))
        self._balance.append((at, load, tokens - new, tokens))

    def prefilled(self, at: float, request: str) -> None:
        sent = self._sent.get(request)
        if sent is not None and sent.first_token is None:
            sent.first_token = sent.load.since = at
            self._off(sent)
            sent.load.first_token.add(at, at - sent.at)

    def ended(self, at: float, request: str) -> None:
        sent = self._sent.pop(request, None)
        if sent is None:
            return
        sent.load.running -= 1
        if sent.first_token is None:
            self._off(sent)
        else:
            self._decoded += 1
            self.decode += max(0.05, 1 / self._decoded) * (at - sent.first_token - self.decode)

    def _off(self, sent: Sent) -> None:
        """It prefills no more."""
        load = sent.load
        load.prefillings -= 1
        load.prefilling = max(0.0, load.prefilling - sent.cost) if load.prefillings else 0.0
        if not load.prefillings:
            self.idle.add(load.name)

    def expire(self, at: float) -> None:
        """Forget what is older than the windows; each request is looked at once."""
        history, oldest = self._history, at - self._window
        while history and (history[0][0] < oldest or len(history) > self._most):
            _, load, cost, key = history.popleft()
            load.requests -= 1
            load.prefill = max(0.0, load.prefill - cost) if load.requests else 0.0
            if key:
                _take_from(load.shares, key, cost)
        balance, oldest = self._balance, at - BALANCE_WINDOW
        while balance and (balance[0][0] < oldest or len(balance) > self._most):
            _, load, hits, tokens = balance.popleft()
            load.hits -= hits
            load.tokens -= tokens


def _take_from(shares: dict[int, Share], key: int, cost: float) -> None:
    share = shares[key]
    share.requests -= 1
    share.cost -= cost
    if not share.requests:
        del shares[key]
