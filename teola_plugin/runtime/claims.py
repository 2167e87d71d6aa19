"""Claims: a result that was requested before serves whoever requests the same later in the query.

Two callers make the requests of a query: the original app, in its own order, and the planner, which prefetches. The
first of them to come with a request key makes the request, and the other one claims it. Only what the original claims
can become visible, so a prefetch never changes an answer. This rests on the request key: everything that decides the
result, and nothing else.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from teola_plugin.requests.payloads import (
    CallTool,
    EmbedText,
    Generate,
    IngestRow,
    Sampling,
    ScorePair,
    SearchText,
    SearchVector,
    Warmup,
)

MAX_REMEMBERED = 256
"""Ended entries of the original that a table remembers for whoever requests the same again."""
MAX_REMEMBERED_WRITES = 1024
"""Ended writes that a table remembers for the planner, which may come to them later."""


class Caller(Enum):
    """One of the two that make the requests of a query."""

    ORIGINAL = "original"
    """The user's object, in its own order."""
    PLANNER = "planner"
    """The graphs of the query, which prefetch."""

    __hash__ = object.__hash__


class ClaimRule(Enum):
    """The rule that says how often an entry may be claimed within its query."""

    PURE = "pure"
    """Any number of times: embedding, reranking, a search at a version."""
    PURE_FOR_PLANNER = "pure for the planner"
    """Any number of times by the planner, once by the original: the user's model is called as often as in the app."""
    ONCE_PER_CALLER = "once per caller"
    """A generation, a web search, a read-only tool: two calls of one caller stay two calls."""
    WRITE = "write"
    """Made by the original and never before it; the planner's own step ends with it."""
    WARM_UP = "warm-up"
    """Any number of times by the planner, since one prefix is warmed up once. Never by the original."""
    ALONE = "alone"
    """Never: tools that may change something, and everything that has no request key."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class PlannerGraph:
    """One of the graphs with which the planner makes requests for a query: its own one, or that of a subplan."""

    name: str = ""
    """Name of the subplan; empty for the query's own graph."""
    round: str = ""
    """Graphs of one round run in parallel, so one of them does not claim what another one has requested. A lone subplan
    is a round."""
    lookahead: bool = False
    """True if it runs ahead of code for which later subplans may begin: these claim what it has requested."""
    since: int = 0
    """Number of calls that the original had made when the graph began."""
    names: frozenset[str] = field(init=False, repr=False)
    rounds: frozenset[str] = field(init=False, repr=False)
    """`name` and `round`, as `Claims` keeps them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset((self.name,)))
        object.__setattr__(self, "rounds", frozenset((self.round,)))


OWN_GRAPH = PlannerGraph()
_CALLERS = {caller: frozenset({caller}) for caller in Caller}
_NO_NAMES: frozenset[str] = frozenset()
_NO_CALLERS: frozenset[Caller] = frozenset()


@dataclass(slots=True, eq=False)
class Claims:
    """The claims to one entry: who made it, who has claimed it, and who may do so."""

    rule: ClaimRule = ClaimRule.ALONE
    made_by: Caller = Caller.ORIGINAL
    key: Hashable | None = None
    """Request key under which a table has the entry; None for an entry that cannot be claimed."""
    callers: frozenset[Caller] = _NO_CALLERS
    """Callers that have ever claimed it."""
    open_by_original: int = 0
    open_by_planner: int = 0
    """Claims that were not given up."""
    graphs: frozenset[str] = _NO_NAMES
    """Graphs of the planner that have it, by the names of their subplans, until these are over."""
    rounds: frozenset[str] = _NO_NAMES
    """Rounds of graphs that have ever claimed it."""
    is_for_later_graph: bool = False
    """True if it was made for a subplan that has yet to begin, whose own graph may claim it."""
    last_claim: int = 0
    """1-based number of the original's call that last claimed it; 0 if none did."""

    def add(self, caller: Caller) -> None:
        """Note a claim."""
        if caller is Caller.PLANNER:
            self.open_by_planner += 1
        else:
            self.open_by_original += 1
        if caller not in self.callers:
            self.callers = self.callers | _CALLERS[caller]

    def give_up(self, caller: Caller) -> bool:
        """Take one claim of a caller back. Return True if nobody wants the entry any more."""
        if caller is Caller.PLANNER:
            self.open_by_planner = max(0, self.open_by_planner - 1)
        else:
            self.open_by_original = max(0, self.open_by_original - 1)
        return not self.is_wanted

    @property
    def is_wanted(self) -> bool:
        """True while a caller waits for the result, or has taken it."""
        return self.open_by_planner > 0 or self.open_by_original > 0

    @property
    def is_left_by_planner(self) -> bool:
        """True if the planner made it, and none of its graphs has it any more."""
        return self.made_by is Caller.PLANNER and not self.graphs

    def add_graph(self, graph: PlannerGraph, *, lookahead: bool, is_new: bool) -> None:
        """Note that a graph has the entry. One that does not look ahead itself is the one that it was made for."""
        self.is_for_later_graph = lookahead and (self.is_for_later_graph or is_new)
        self.graphs = self.graphs | graph.names if self.graphs else graph.names
        self.rounds = self.rounds | graph.rounds if self.rounds else graph.rounds

    def remove_graph(self, name: str) -> bool:
        """Note that a subplan is over. Return True if no graph of the query has the entry any more."""
        self.graphs -= {name}
        return not self.graphs


class Claimable(Protocol):
    """An entry of a `ClaimTable`: a request that is expected, under way or done."""

    claims: Claims

    @property
    def is_claimable(self) -> bool:
        """Return False once it was cancelled, withdrawn, outdated, or failed in a way that may pass.

        The table checks it whenever the original or the planner makes an equal request, and when an entry ends.
        """
        ...

    @property
    def is_expected(self) -> bool:
        """True while nobody has started it: the planner waits for the original to do so."""
        ...

    def forget(self) -> None:
        """Let the result go: nobody can claim it any more."""
        ...


Entry = TypeVar("Entry", bound=Claimable)


class ClaimTable(Generic[Entry]):
    """The entries of one query, by request key. May be used from any thread.

    Entries are kept until `end` or `release` finds that nobody can claim them any more. Of those that somebody could,
    a table remembers the newest ones, so that its memory is bounded.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._entries: dict[Hashable, list[Entry]] = {}
        self._remembered: OrderedDict[int, Entry] = OrderedDict()
        """Ended entries of the original, and of subplans that are over, by their identity."""
        self._writes: OrderedDict[int, Entry] = OrderedDict()
        """Ended writes of the original."""
        self._has_lookahead = False
        """True once a graph that looks ahead has claimed: then later graphs may claim the same."""
        self._lock = threading.Lock()

    # ------------------------------------------------------------ claims

    def claim(self, key: Hashable, caller: Caller, graph: PlannerGraph = OWN_GRAPH) -> Entry | None:
        """Claim the oldest entry that `caller` may have. Return None if there is none.

        `graph`: the graph that claims, if the caller is the planner.
        """
        with self._lock:
            return self._claim(key, caller, graph)

    def claim_or_add(
        self, key: Hashable | None, caller: Caller, make: Callable[[], Entry], graph: PlannerGraph = OWN_GRAPH
    ) -> Entry:
        """Claim an entry, or else the new one that `make` returns. An entry without a key serves this claim only.

        Whoever gets an entry that `is_expected` has to start it, unless the rule leaves that to the original.
        """
        with self._lock:
            entry = None if key is None else self._claim(key, caller, graph)
            if entry is None:
                entry = make()
                self._add(key, entry)
                self._note(entry, caller, graph)
            return entry

    def add(self, key: Hashable, entry: Entry, caller: Caller) -> None:
        """Add an entry that `caller` has claimed, beside all others with this key."""
        with self._lock:
            self._add(key, entry)
            entry.claims.add(caller)

    def offer(self, key: Hashable, entry: Entry, unless: Callable[[Entry], bool] = lambda _: False) -> bool:
        """Add an entry that nobody has claimed yet. Return False if `unless` is true of one with this key."""
        with self._lock:
            if any(map(unless, self._entries.get(key, ()))):
                return False
            self._add(key, entry)
            return True

    def has(self, key: Hashable) -> bool:
        """Return True if an entry with this key is expected, under way or done, and was not cancelled or lost.

        It does not matter who may claim it. A prefetcher that finds one makes no equal call.
        """
        with self._lock:
            return any(entry.is_claimable for entry in self._entries.get(key, ()))

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the entries of this moment.

        May be used from any thread: entries that are added or dropped meanwhile do not disturb it.
        """
        with self._lock:
            entries = [entry for entries in self._entries.values() for entry in entries]
        return iter(entries)

    def _claim(self, key: Hashable, caller: Caller, graph: PlannerGraph) -> Entry | None:
        """Claim the oldest entry with this key that `caller` may have. Return None if there is none.

        Callers hold the lock.
        """
        for entry in self._entries.get(key, ()):
            if entry.is_claimable and _may_claim(entry, caller, graph):
                self._note(entry, caller, graph)
                return entry
        return None

    def _note(self, entry: Entry, caller: Caller, graph: PlannerGraph) -> None:
        entry.claims.add(caller)
        self._has_lookahead |= graph.lookahead

    def _add(self, key: Hashable | None, entry: Entry) -> None:
        """Enter an entry under its request key, unless the rule of its payload forbids that anybody else claims it.

        The caller holds the lock. A `key` of None means that requests of this kind have no key.
        """
        if key is not None and entry.claims.rule is not ClaimRule.ALONE:
            entry.claims.key = key
            self._entries.setdefault(key, []).append(entry)

    # ------------------------------------------------------------ ends

    def end(self, entry: Entry) -> None:
        """Forget an ended entry if nobody can claim it any more. Remember those of the original for a while.

        A prefetched one stays until `release`.
        """
        with self._lock:
            claims = entry.claims
            if not (_can_be_claimed_again(entry) or self._can_be_claimed_late(entry)):
                self._drop(entry)
            elif claims.made_by is Caller.ORIGINAL or claims.rule is ClaimRule.WRITE:
                self._remember(entry)

    def release(self, entry: Entry) -> None:
        """Forget an ended entry whose graphs are over, unless a later graph may claim it."""
        with self._lock:
            if self._can_be_claimed_late(entry):
                self._remember(entry)
            else:
                self._drop(entry)

    def drop(self, entry: Entry) -> None:
        """Forget an entry: nobody shall claim it."""
        with self._lock:
            self._drop(entry)

    def drop_writes(self, is_outdated: Callable[[Entry], bool]) -> None:
        """Forget the ended writes of which `is_outdated` is true.

        `is_outdated` is called under the table's lock: it must be quick, and must not use the table.
        """
        with self._lock:
            for entry in [entry for entry in self._writes.values() if is_outdated(entry)]:
                self._drop(entry)

    def _can_be_claimed_late(self, entry: Entry) -> bool:
        """Return True if a subplan may begin that claims an entry which both callers, or a finished subplan, have had.

        A prefix stays warm. Among subplans that look ahead, one may begin for the code for which another one began.
        """
        if not entry.is_claimable or entry.claims.key is None:
            return False
        rule = entry.claims.rule
        return rule is ClaimRule.WARM_UP or (self._has_lookahead and rule in _FOR_LATER_GRAPHS)

    def _remember(self, entry: Entry) -> None:
        """Keep an ended entry for a later claim, and drop the oldest remembered one if they are too many.

        Callers hold the lock.
        """
        is_write = entry.claims.rule is ClaimRule.WRITE
        memory = self._writes if is_write else self._remembered
        memory[id(entry)] = entry
        if len(memory) > (MAX_REMEMBERED_WRITES if is_write else self._max_remembered):
            self._drop(next(iter(memory.values())))

    def _drop(self, entry: Entry) -> None:
        """Remove an entry from the table, and let its result go. Callers hold the lock."""
        self._remembered.pop(id(entry), None)
        self._writes.pop(id(entry), None)
        key = entry.claims.key
        if key is not None:
            remaining = [other for other in self._entries.get(key, ()) if other is not entry]
            if remaining:
                self._entries[key] = remaining
            else:
                self._entries.pop(key, None)
        entry.forget()


_FOR_LATER_GRAPHS = (ClaimRule.PURE, ClaimRule.ONCE_PER_CALLER)
_REPEATABLE = (ClaimRule.PURE, ClaimRule.PURE_FOR_PLANNER, ClaimRule.WARM_UP)


def _can_be_claimed_again(entry: Claimable) -> bool:
    """Return True if the rule of an ended entry allows another claim, so that the table has to keep it."""
    claims = entry.claims
    if not entry.is_claimable or claims.key is None:
        return False
    return claims.rule in _REPEATABLE or len(claims.callers) < len(Caller) or claims.is_for_later_graph


def _may_claim(entry: Claimable, caller: Caller, graph: PlannerGraph) -> bool:
    """Return True if the entry's rule lets `caller` claim it, by who has claimed it before.

    The caller of this function has checked that the entry `is_claimable`. `graph` counts for the planner only.
    """
    claims = entry.claims
    rule = claims.rule
    if rule is ClaimRule.PURE:
        return True
    if caller is Caller.ORIGINAL:
        if rule is ClaimRule.WRITE:
            return entry.is_expected  # the one that the planner waits for; any other write is one of its own
        return rule is not ClaimRule.WARM_UP and caller not in claims.callers
    if rule in _REPEATABLE:
        return True
    if rule is ClaimRule.ONCE_PER_CALLER and graph.lookahead and 0 < claims.last_claim <= graph.since:
        return False  # the original had that before the subplan began, which is for another call
    if caller not in claims.callers:
        return True
    if graph.round in claims.rounds:
        return False
    return claims.is_for_later_graph or (graph.lookahead and OWN_GRAPH.round not in claims.rounds)


class RemoteValue:
    """Stands for a value that only engines read. It is looked up before anybody else may see it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<remote value>"


_RULES: dict[type, ClaimRule] = {
    EmbedText: ClaimRule.PURE,
    ScorePair: ClaimRule.PURE,
    SearchVector: ClaimRule.PURE,
    Generate: ClaimRule.ONCE_PER_CALLER,
    SearchText: ClaimRule.ONCE_PER_CALLER,
    Warmup: ClaimRule.WARM_UP,
    IngestRow: ClaimRule.WRITE,
}


def rule_of(payload: Any) -> ClaimRule:
    """Return the claim rule of a payload's kind.

    A tool is claimed only if it is declared read-only; a payload of an unknown type is never claimed by another call.
    """
    if type(payload) is CallTool and payload.read_only:
        return ClaimRule.ONCE_PER_CALLER
    return _RULES.get(type(payload), ClaimRule.ALONE)


class EngineFingerprint(NamedTuple):
    """The properties of an engine that decide its results."""

    engine: str
    model: str = ""
    revision: str = ""
    prompts: str = ""
    """Prefixes that the engine puts before texts, by role."""
    normalisation: str = ""


class RequestKey(NamedTuple):
    """Everything that decides a result. Values that only Python takes for equal (`True`, `1`, `1.0`) differ."""

    tenant: str
    engine: EngineFingerprint
    payload: Hashable
    """The payload, with the types of its values."""


def request_key(engine: EngineFingerprint, tenant: str, payload: Any) -> RequestKey | None:
    """Return the key of a request; None if it may not be claimed, or cannot be compared with others."""
    snapshot_payload = _PAYLOAD_KEYS.get(type(payload))
    try:
        key = None if snapshot_payload is None else snapshot_payload(payload)
        hash(key)
    except (TypeError, ValueError, OverflowError):  # e.g. a vector of no numbers: its engine will say so
        return None
    return None if key is None else RequestKey(tenant, engine, key)


_sampling_values = attrgetter(*(f.name for f in fields(Sampling)))
"""Return the values of a `Sampling`. (`dataclasses.astuple` copies each of them, which takes ten times as long.)"""


def _generation_key(payload: Generate) -> Hashable:
    return payload, typed(_sampling_values(payload.sampling))


def _search_key(payload: SearchVector) -> Hashable:
    return "search", payload.collection, payload.k, typed(payload.filter), _vector_bytes(payload.vector)


def _web_search_key(payload: SearchText) -> Hashable:
    return "search by words", payload.query, payload.k


def _tool_key(payload: CallTool) -> Hashable | None:
    return ("tool", payload.tool, typed(dict(payload.arguments))) if payload.read_only else None


def _row_key(payload: IngestRow) -> Hashable:
    """Return the request key of a row that is written.

    It holds collection, id, text, metadata with types, and the vector's digest. A vector that stays in a shared pool is
    known by identity, since its numbers are elsewhere.
    """
    chunk, vector = payload.chunk, payload.vector
    digest = ("kept", id(vector)) if isinstance(vector, RemoteValue) else _digest(_vector_bytes(vector))
    return "row", payload.collection, chunk.id, chunk.text, typed(dict(chunk.metadata)), digest


def _warmup_key(payload: Warmup) -> Hashable:
    return "warm-up", _digest(payload.prompt.known_prefix().encode(errors="surrogatepass"))


def _payload_itself(payload: Any) -> Hashable:
    return cast(Hashable, payload)


_PAYLOAD_KEYS: dict[type, Callable[[Any], Hashable | None]] = {
    EmbedText: _payload_itself,
    ScorePair: _payload_itself,
    Generate: _generation_key,
    SearchVector: _search_key,
    SearchText: _web_search_key,
    CallTool: _tool_key,
    IngestRow: _row_key,
    Warmup: _warmup_key,
}
"""By the very class, which is quickly looked up: both callers need the key of each of their requests."""


def typed(value: Any) -> Hashable:
    """Return the value with its types all the way down: `True`, `1` and `1.0` differ, as they do for an engine.

    Raises TypeError for what is neither plain data nor hashable.
    """
    kind = type(value)
    if kind is dict:
        return "dict", tuple((typed(key), typed(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return kind.__name__, tuple(map(typed, value))
    if kind is float:
        return "float", value.hex()
    hash(value)
    return kind, value


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _vector_bytes(vector: Sequence[float]) -> bytes:
    """Return float32 bytes, equal for a numpy vector and for the list of floats made from it."""
    astype = getattr(vector, "astype", None)
    return bytes(astype("float32").tobytes()) if astype is not None else array("f", vector).tobytes()


def fingerprint(name: str, engine: Any) -> EngineFingerprint:
    """Return the fingerprint of an engine as it is known here."""
    versions = engine.versions()
    prompt_of = getattr(engine, "prompt_of", None)
    prompts = "" if prompt_of is None else repr([prompt_of(role) for role in ("query", "document")])
    model = str(versions.get("model", getattr(engine, "model_name", "")))
    return EngineFingerprint(
        name, model, str(versions.get("revision", "")), prompts, str(getattr(engine, "normalize", ""))
    )
