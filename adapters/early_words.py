"""What begins before its place, in words: a p-graph and its e-graph, compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from teola_plugin.adapters.early_work import freed
from teola_plugin.graph import LLM_KINDS, Graph, InstancePath, Primitive, PrimitiveKind, is_impure
from teola_plugin.passes import Optimised
from teola_plugin.passes.decoding_pipelining import held
from teola_plugin.tracer.draft import DERIVED

_K = PrimitiveKind
_NOUNS = (
    (_K.DECODING, "model call", "model calls"),
    (_K.SEARCHING, "search", "searches"),
    (_K.RERANKING, "reranking", "rerankings"),
    (_K.INGESTION, "ingestion", "ingestions"),
    (_K.EMBEDDING, "embedding", "embeddings"),
)
"""What a component is called by the last of its primitives, one and several."""
_MOST = 3
"""Names that are written out."""
_ENDING = re.compile(rf"(\.({'|'.join(DERIVED)}))?(\.(partial|grown))?(#\d+)?$")


def component_of(id_: str) -> str:
    """The component that a primitive was made of: `found[0]/found.retrieve.embedding` is `found.retrieve`'s."""
    name, before = id_.rpartition("/")[2], ""
    while name != before:
        before, name = name, _ENDING.sub("", name)
    return name


def listed(names: Sequence[str], word: str = "and") -> str:
    """All of a few names; the first of many."""
    if len(names) > _MOST:
        return f"{', '.join(names[:_MOST])} {word} {len(names) - _MOST} more"
    return f" {word} ".join(one for one in (", ".join(names[:-1]), *names[-1:]) if one)


def begins_early(plan: Optimised, ahead: Iterable[str] | None = None) -> tuple[str, ...]:
    """One phrase for each thing that a plan gains, most important first.

    `ahead`: the call sites of the user's own objects that may be asked early; None where all may.
    """
    source, graph = plan.source, plan.graph
    if source is None:
        return ()
    sites = None if ahead is None else frozenset(ahead)
    return (
        *_side_by_side(source, graph, sites),
        *_items(source, graph),
        *_in_stages(source, graph),
        *_beginnings(graph),
    )


# ------------------------------------------------------------ calls beside each other


def _side_by_side(source: Graph, graph: Graph, sites: frozenset[str] | None) -> Iterator[str]:
    kinds = _kinds(source)
    for group in _groups(source, graph, sites):
        asked = [name for name in group if name in kinds]
        code = [name for name in group if name not in kinds]
        how = "side by side" if len(asked) > 1 else "ahead of its place"
        yield f"{_counted(asked, kinds)} {how}" + (f", without waiting for your code ({listed(code)})" if code else "")


def _groups(source: Graph, graph: Graph, sites: frozenset[str] | None) -> list[list[str]]:
    """Calls that do not wait for each other any more, with the user code that they do not wait for; each in order."""
    groups: list[set[str]] = []
    for p in source:
        if not asks(p) or p.id not in graph or (sites is not None and not sites & _sites(p)):
            continue
        group = {
            component_of(p.id),
            *(component_of(name) for name in freed(p.id, source, graph) if _counts(source[name])),
        }
        if len(group) > 1:
            touched = [other for other in groups if other & group]
            groups = [*(other for other in groups if not other & group), group.union(*touched)]
    order = list(dict.fromkeys(component_of(p.id) for p in source))
    return [sorted(group, key=order.index) for group in groups]


def asks(p: Primitive) -> bool:
    """Whether it, or what it holds, asks engines for something."""
    return any(one.on_engine for one in held(p))


def _counts(p: Primitive) -> bool:
    return asks(p) or is_impure(p)


def _sites(p: Primitive) -> set[str]:
    return {one.attributes.wrapped for one in held(p)}


def _kinds(graph: Graph) -> dict[str, set[PrimitiveKind]]:
    """Components that ask engines for something, in order, and for what."""
    found: dict[str, set[PrimitiveKind]] = {}
    for p in graph:
        if kinds := {one.kind for one in held(p) if one.on_engine}:
            found.setdefault(component_of(p.id), set()).update(kinds)
    return found


def _counted(names: Sequence[str], kinds: dict[str, set[PrimitiveKind]]) -> str:
    """E.g. `2 searches and 1 model call (a, b, c)`."""
    nouns = Counter(_noun(kinds[name]) for name in names)
    told = [f"{count} {several if count > 1 else one}" for (one, several), count in nouns.items()]
    return f"{' and '.join(told)} ({listed(names)})"


def _noun(kinds: set[PrimitiveKind]) -> tuple[str, str]:
    return next(((one, several) for kind, one, several in _NOUNS if kind in kinds), ("model call", "model calls"))


# ------------------------------------------------------------ lists, stages, beginnings of prompts


def _items(source: Graph, graph: Graph) -> Iterator[str]:
    """What is done for each item of a list, as it is written, or side by side."""
    kinds, told = _kinds(source), dict[str, str]()
    for p in graph:
        if p.tentative and p.on_engine and "[" in p.id:
            told.setdefault(InstancePath(p.id).outermost.partition("[")[0], "as soon as its item is written")
        elif p.attributes.grow:
            told.setdefault(p.id, "as soon as its item is written")
        elif p.holds_fragment and p.attributes.beside and asks(p):
            told.setdefault(p.id, "beside those of the other items")
    for holder, how in told.items():
        yield f"each {_noun(kinds.get(holder, set()))[0]} of {holder} {how}"


def _in_stages(source: Graph, graph: Graph) -> Iterator[str]:
    cut = [p.id.partition("#")[0] for p in graph if p.on_engine and p.kind not in LLM_KINDS and "#" in p.id]
    names = list(dict.fromkeys(component_of(name) for name in cut if name in source))
    if names:
        yield f"{listed(names)} in stages, each beside the one before"


def _beginnings(graph: Graph) -> Iterator[str]:
    """The longest beginning of each prompt that is prefilled early."""
    tokens: dict[str, int] = {}
    for p in graph:
        if p.kind is _K.PARTIAL_PREFILLING:
            name = component_of(p.id)
            tokens[name] = max(tokens.get(name, 0), sum(part.tokens for part in p.prompt))
    if tokens:
        told = [f"of {name} ({count} tokens and more)" for name, count in tokens.items()]
        yield f"the beginning of the prompt {listed(told)}"
