"""Who may claim a work, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from teola_plugin.graph import Terms
from teola_plugin.runtime.works.identities import OWN_GRAPH, EarlyGraph, Identity, Party, Rule, asked
from teola_plugin.runtime.works.work import Work

KEPT = 256
"""Ended works of a query that the plain object made, remembered for whoever asks for the same again."""
WRITTEN = 1024
"""Rows that the plain object has written, remembered for the graph, which may come to them later."""


class _Works:
    """Of one query."""

    def __init__(self) -> None:
        self.by_identity: dict[Identity, list[Work]] = {}
        self.open: dict[str, Work] = {}
        """Those that have not ended, by request."""
        self.early: dict[str, Work] = {}
        """Those that a graph asked for first, by request: settled at the end."""
        self.remembered: OrderedDict[str, Work] = OrderedDict()
        """Ended works of the plain object, and of parts that are over."""
        self.written: OrderedDict[str, Work] = OrderedDict()
        """Its rows, once they are in the store."""
        self.lookahead = False
        """Whether parts look ahead: then others may come late, and for the same."""


class WorkTable:
    """All works of a pool. Across queries nothing is shared (yet): each query has works of its own."""

    def __init__(self, kept: int = KEPT) -> None:
        self._queries: dict[str, _Works] = {}
        self._kept = kept

    def join(
        self,
        query: str,
        identity: Identity | None,
        party: Party,
        terms: Terms,
        rule: Rule,
        make: Callable[[], Work],
        graph: EarlyGraph = OWN_GRAPH,
    ) -> Work:
        """The work that `party` of the query gets for this identity, subscribed to: one that is there, if the rule
        lets it be claimed, or else the one that `make` makes for this party. Who gets one that is not `made` yet has
        to send it, unless it waits for the other party's write. `graph`: the one that asks, if it is early."""
        found = self._claimable(query, identity, party, rule, graph)
        if found is None:
            found = make()
            self._add(query, found)
        if graph.lookahead:
            self._queries[query].lookahead = True
        found.subscribe(party, terms)
        return found

    def _claimable(
        self, query: str, identity: Identity | None, party: Party, rule: Rule, graph: EarlyGraph
    ) -> Work | None:
        """Not failed, not cancelled, not stale, not taken."""
        works = self._queries.get(query)
        if works is None or identity is None or rule is Rule.ALONE:
            return None
        for work in works.by_identity.get(identity, ()):
            if not (work.cancelled or work.lost or work.stale) and _may_claim(work, party, rule, graph):
                return work
        return None

    def _add(self, query: str, work: Work) -> None:
        works = self._queries.get(query)
        if works is None:
            works = self._queries[query] = _Works()
        works.open[work.request.id] = work
        if work.by is Party.EARLY:
            works.early[work.request.id] = work
        if work.identity is not None and work.rule is not Rule.ALONE:
            works.by_identity.setdefault(work.identity, []).append(work)

    def guess(self, query: str, work: Work) -> None:
        """A provisional work of the query: any party may claim it, as the first one."""
        work.provisional = work.guessed = True
        self._add(query, work)

    def guessed_wrong(self, work: Work) -> None:
        """Nobody will come for it."""
        works = self._queries.get(work.request.query)
        if works is not None:
            works.open.pop(work.request.id, None)
            works.early.pop(work.request.id, None)
            self._drop(works, work)

    def has(self, query: str, identity: Identity) -> bool:
        """Whether somebody has asked for it in this query, and has it, or will."""
        works = self._queries.get(query)
        found = works.by_identity.get(identity, ()) if works is not None else ()
        return any(not (work.cancelled or work.lost or work.stale) for work in found)

    def leave(self, work: Work, party: Party) -> bool:
        """One of the party does not want it any more. Whether nobody does."""
        work.unsubscribe(party)
        return not work.wanted

    def ended(self, work: Work, value: Any, error: BaseException | None) -> None:
        """Tell who waits; forget what nobody can claim any more."""
        works = self._queries.get(work.request.query)
        work.resolve(value, error)
        if works is None or works.open.pop(work.request.id, None) is None:
            return
        if not (_may_be_asked_again(work) or _may_come_late(works, work)):
            self._drop(works, work)
        elif work.by is Party.PLAIN or work.rule is Rule.WRITE:
            self._remember(works, work)

    def overwritten(self, engine: str, collection: str) -> None:
        """The plain object writes or deletes there: a row that it wrote before is not claimed across that."""
        for works in self._queries.values():
            for name, work in list(works.written.items()):
                if work.engine == engine and work.request.payload.collection == collection:
                    del works.written[name]
                    self._drop(works, work)

    def discard(self, query: str, works: Iterable[Work]) -> None:
        """The parts of the query that had them are over: what has ended is let go, some of it later."""
        found = self._queries.get(query)
        if found is None:
            return
        for work in works:
            if not work.ended or found.early.pop(work.request.id, None) is None:
                continue
            if _may_come_late(found, work):
                self._remember(found, work)
            else:
                self._drop(found, work)

    def _remember(self, works: _Works, work: Work) -> None:
        """Whoever asks for the same finds it, until too many others have come."""
        kept, most = (works.written, WRITTEN) if work.rule is Rule.WRITE else (works.remembered, self._kept)
        kept[work.request.id] = work
        if len(kept) > most:
            self._drop(works, kept.popitem(last=False)[1])

    @staticmethod
    def _drop(works: _Works, work: Work) -> None:
        if work.identity is not None:
            key = asked(work.identity)
            left = [other for other in works.by_identity.get(key, ()) if other is not work]
            if left:
                works.by_identity[key] = left
            else:
                works.by_identity.pop(key, None)
        work.forget()

    def of(self, query: str) -> Iterator[Work]:
        """Those under way, and those that the graph asked for first."""
        works = self._queries.get(query)
        if works is not None:
            yield from (works.early | works.open).values()

    def forget(self, query: str) -> None:
        """The query is over: whoever still waits for a work holds it by itself."""
        self._queries.pop(query, None)

    def __len__(self) -> int:
        return len(self._queries)


def _may_come_late(works: _Works, work: Work) -> bool:
    """Whether a part may ask for what both parties have had, or a part that is over: a prefix stays warm, and of parts
    that look ahead one may be begun for what another was begun for."""
    if work.lost or work.cancelled or work.identity is None:
        return False
    return work.rule is Rule.WARM_UP or (works.lookahead and work.rule in (Rule.PURE, Rule.ONCE_PER_PARTY))


def _may_be_asked_again(work: Work) -> bool:
    if work.lost or work.cancelled or work.identity is None or work.rule is Rule.ALONE:
        return False
    return work.rule in _ANY_NUMBER or len(work.claimed) < len(Party) or work.lookahead


_ANY_NUMBER = (Rule.PURE, Rule.WARM_UP)


def _may_claim(work: Work, party: Party, rule: Rule, graph: EarlyGraph) -> bool:
    if rule is Rule.PURE:
        return True
    if party is Party.PLAIN:
        if rule is Rule.WRITE:
            return not work.made  # what the graph waits for; any other write is one of its own
        return rule is not Rule.WARM_UP and party not in work.claimed
    if rule is Rule.WARM_UP:
        return True
    if rule is Rule.ONCE_PER_PARTY and graph.lookahead and 0 < work.taken <= graph.since:
        return False  # the plain object had that before the part began: what the part is for is another call
    if party not in work.claimed:
        return True
    if graph.round in work.rounds:
        return False
    return work.lookahead or (graph.lookahead and OWN_GRAPH.round not in work.rounds)
