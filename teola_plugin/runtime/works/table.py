"""Who may claim a work, and until when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from teola_plugin.graph import Terms
from teola_plugin.runtime.works.identities import Identity, Party, Rule, asked
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
        self.early: list[Work] = []
        """Those that the graph asked for first: settled at the end."""
        self.remembered: OrderedDict[str, Work] = OrderedDict()
        """Ended works of the plain object."""
        self.written: OrderedDict[str, Work] = OrderedDict()
        """Its rows, once they are in the store."""


class WorkTable:
    """All works of a pool. Across queries nothing is shared (yet): each query has works of its own."""

    def __init__(self, kept: int = KEPT) -> None:
        self._queries: dict[str, _Works] = {}
        self._kept = kept

    def join(
        self, query: str, identity: Identity | None, party: Party, terms: Terms, rule: Rule, make: Callable[[], Work]
    ) -> Work:
        """The work that `party` of the query gets for this identity, subscribed to: one that is there, if the rule
        lets it be claimed, or else the one that `make` makes for this party. Who gets one that is not `made` yet has
        to send it, unless it waits for the other party's write."""
        found = self._claimable(query, identity, party, rule)
        if found is None:
            found = make()
            self._add(query, found)
        found.subscribe(party, terms)
        return found

    def _claimable(self, query: str, identity: Identity | None, party: Party, rule: Rule) -> Work | None:
        """Not failed, not cancelled, not stale, not taken."""
        works = self._queries.get(query)
        if works is None or identity is None or rule is Rule.ALONE:
            return None
        for work in works.by_identity.get(identity, ()):
            if not (work.cancelled or work.failed or work.stale) and _may_claim(work, party, rule):
                return work
        return None

    def _add(self, query: str, work: Work) -> None:
        works = self._queries.get(query)
        if works is None:
            works = self._queries[query] = _Works()
        works.open[work.request.id] = work
        if work.by is Party.EARLY:
            works.early.append(work)
        if work.identity is not None and work.rule is not Rule.ALONE:
            works.by_identity.setdefault(work.identity, []).append(work)

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
        if not _may_be_asked_again(work):
            self._drop(works, work)
        elif work.by is Party.PLAIN or work.rule is Rule.WRITE:
            kept, most = (works.written, WRITTEN) if work.rule is Rule.WRITE else (works.remembered, self._kept)
            kept[work.request.id] = work
            if len(kept) > most:
                self._drop(works, kept.popitem(last=False)[1])

    def overwritten(self, engine: str, collection: str) -> None:
        """The plain object writes or deletes there: a row that it wrote before is not claimed across that."""
        for works in self._queries.values():
            for name, work in list(works.written.items()):
                if work.engine == engine and work.request.payload.collection == collection:
                    del works.written[name]
                    self._drop(works, work)

    def discard(self, query: str, works: Iterable[Work]) -> None:
        """The part of the query that made them is over: what has ended is let go."""
        found, gone = self._queries.get(query), {id(work) for work in works if work.ended}
        if found is None or not gone:
            return
        for work in [work for work in found.early if id(work) in gone]:
            self._drop(found, work)
        found.early = [work for work in found.early if id(work) not in gone]

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
            yield from {id(work): work for work in (*works.early, *works.open.values())}.values()

    def forget(self, query: str) -> None:
        """The query is over: whoever still waits for a work holds it by itself."""
        self._queries.pop(query, None)

    def __len__(self) -> int:
        return len(self._queries)


def _may_be_asked_again(work: Work) -> bool:
    if work.failed or work.cancelled or work.identity is None or work.rule is Rule.ALONE:
        return False
    return work.rule is Rule.PURE or len(work.claimed) < len(Party) or work.lookahead


def _may_claim(work: Work, party: Party, rule: Rule) -> bool:
    if rule is Rule.PURE:
        return True
    if rule is Rule.WRITE and party is Party.PLAIN:
        return not work.made  # what the graph waits for; any other write is one of its own
    return party not in work.claimed or (party is Party.EARLY and work.lookahead)
