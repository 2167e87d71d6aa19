"""What an app's requests have written lately, by app and tenant: never a source for another tenant."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from teola_plugin.engines.drafts.corpus import Corpus

_BETWEEN = (-1, -2)
"""Stands between outputs: no model writes it, and nothing is found across it."""

Source = tuple[str, str]
"""App and tenant."""


class RecentOutputs:
    """The recent outputs of apps, bounded in tokens per app and in apps. The oldest are dropped first."""

    def __init__(self, tokens: int = 16_384, sources: int = 64) -> None:
        self._most, self._sources = tokens, sources
        self._kept: OrderedDict[Source, tuple[Corpus, deque[Sequence[int]]]] = OrderedDict()

    def of(self, source: Source) -> Corpus | None:
        kept = self._kept.get(source)
        return None if kept is None else kept[0]

    def add(self, source: Source, output: Sequence[int]) -> None:
        """Add an output that has ended, also one that was cut off."""
        if len(output) < 4 or len(output) > self._most // 2:
            return
        corpus, outputs = self._kept.setdefault(source, (Corpus(), deque()))
        self._kept.move_to_end(source)
        outputs.append(output)
        if len(corpus) + len(output) > self._most:
            while sum(len(one) + 2 for one in outputs) > self._most // 2:
                outputs.popleft()
            corpus = Corpus()
            for one in outputs:
                corpus.add((*one, *_BETWEEN))
            self._kept[source] = corpus, outputs
        else:
            corpus.add((*output, *_BETWEEN))
        while len(self._kept) > self._sources:
            self._kept.popitem(last=False)

    def forget(self, tenant: str | None = None) -> None:
        """Forget all outputs, or those of a tenant."""
        for source in [one for one in self._kept if tenant is None or one[1] == tenant]:
            del self._kept[source]
