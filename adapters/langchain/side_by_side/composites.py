"""Composites whose sync code calls its parts one after the other, with the calls begun together.

Each class here stands before the framework's own: it looks at what is about to be called, and has the framework's code
run on a copy of the object whose parts take the calls that have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from langchain_core.runnables import RunnableConfig

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.langchain.side_by_side import classes
from teola_plugin.adapters.langchain.side_by_side.models import together
from teola_plugin.adapters.langchain.side_by_side.siblings import Siblings, Taken, begin, bounded

PARTS = "__teola_parts__"
"""Of an object of one of these classes: which of its parts, in order, several threads may call."""


class Composite:
    """Any of them: where a caller bounds the calls at once, they are made as ever."""

    def invoke(self: Any, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        if not config or config.get("max_concurrency") is None:
            return super().invoke(input, config, **kwargs)  # type: ignore[misc]
        before = bounded.set(True)
        try:
            return super().invoke(input, config, **kwargs)  # type: ignore[misc]
        finally:
            bounded.reset(before)


class ManyQueries(Composite):
    """`MultiQueryRetriever`: the queries are known."""

    def retrieve_documents(self: Any, queries: list[str], run_manager: Any) -> Any:
        config: RunnableConfig = {"callbacks": run_manager.get_child()}
        wanted = [(self.retriever, query) for query in queries]
        with _begun(self, wanted, config, lambda calls: {"retriever": Taken(self.retriever, calls)}) as taking:
            return super(ManyQueries, taking).retrieve_documents(queries, run_manager)  # type: ignore[misc]


class ManyRetrievers(Composite):
    """`EnsembleRetriever` and `MergerRetriever`: the query is known."""

    def rank_fusion(self: Any, query: str, run_manager: Any, *, config: RunnableConfig | None = None) -> Any:
        told: RunnableConfig = {**(config or {}), "callbacks": run_manager.get_child()}
        with self._asking(query, told) as taking:
            return super(ManyRetrievers, taking).rank_fusion(query, run_manager, config=config)  # type: ignore[misc]

    def merge_documents(self: Any, query: str, run_manager: Any) -> Any:
        with self._asking(query, {"callbacks": run_manager.get_child()}) as taking:
            return super(ManyRetrievers, taking).merge_documents(query, run_manager)  # type: ignore[misc]

    def _asking(self: Any, query: str, config: RunnableConfig) -> Any:
        may = vars(self)[PARTS]
        beside = [(one, query) for i, one in enumerate(self.retrievers) if not i or (i < len(may) and may[i])]
        taken = lambda calls: {"retrievers": [Taken(one, calls) for one in self.retrievers]}  # noqa: E731
        return _begun(self, beside, config, taken)


class ManyDocuments(Composite):
    """`LLMChainExtractor`: the documents are known."""

    def compress_documents(self: Any, documents: Sequence[Any], query: str, callbacks: Any = None) -> Any:
        wanted = [(self.llm_chain, self.get_input(query, one)) for one in documents]
        taken = lambda calls: {"llm_chain": Taken(self.llm_chain, calls)}  # noqa: E731
        with _begun(self, wanted, {"callbacks": callbacks}, taken) as taking:
            return super(ManyDocuments, taking).compress_documents(documents, query, callbacks)  # type: ignore[misc]


class ManyPrompts(Composite):
    """`LLMChain`: its inputs are known, when it is applied to several."""

    def generate(self: Any, input_list: list[dict[str, Any]], run_manager: Any = None) -> Any:
        copied = self.model_copy(update={"llm": together(self.llm)}) if len(input_list) > 1 else self
        return super(ManyPrompts, copied).generate(input_list, run_manager)  # type: ignore[misc]


BY_NAME: Mapping[str, type] = {
    classes.MULTI_QUERY: ManyQueries,
    classes.ENSEMBLE: ManyRetrievers,
    classes.MERGER: ManyRetrievers,
    classes.EXTRACTOR: ManyDocuments,
    classes.LLM_CHAIN: ManyPrompts,
}


@contextmanager
def _begun(
    node: Any, wanted: Sequence[tuple[Any, Any]], config: RunnableConfig, taken: Callable[[Siblings], dict[str, Any]]
) -> Iterator[Any]:
    """The object whose code is to run: one whose parts take the calls that have begun, if any have."""
    calls = _started(wanted, config)
    if calls is None:
        yield node
        return
    try:
        yield node.model_copy(update=taken(calls))
    finally:
        calls.close()


def _started(wanted: Sequence[tuple[Any, Any]], config: RunnableConfig) -> Siblings | None:
    try:
        return begin(wanted, config)
    except Exception as error:  # nothing has been called yet
        log_fallback(error)
        return None
