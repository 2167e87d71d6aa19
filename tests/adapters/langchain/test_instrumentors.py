"""Tests of instrumentation that adds its tracer to every callback manager, as OpenInference and OpenLLMetry do.

Such a tracer sees each call of the original once, and no prefetch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import pytest
from langchain_classic.retrievers import MergerRetriever
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tracers import BaseTracer, Run
from support.provider_models import Model, Server

from teola_plugin import accelerate

INPUT = {"q": "why"}
QUESTION = RunnableLambda(itemgetter("q"))


class Tracer(BaseTracer):
    """Keeps the runs that it hears of, each with the names of the runs around it, and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[str, ...]] = []
        self._names: dict[Any, tuple[str, ...]] = {}

    def _persist_run(self, run: Run) -> None: ...

    def _start_trace(self, run: Run) -> None:
        super()._start_trace(run)
        self._names[run.id] = (*self._names.get(run.parent_run_id, ()), run.name)

    def _end_trace(self, run: Run) -> None:
        super()._end_trace(run)
        self.ended.append((*self._names[run.id], "failed" if run.error else "done"))


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    tracer, original = Tracer(), BaseCallbackManager.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not any(isinstance(handler, Tracer) for handler in self.inheritable_handlers):
            self.add_handler(tracer, True)

    monkeypatch.setattr(BaseCallbackManager, "__init__", init)
    yield tracer


class Shelf(BaseRetriever):
    name: str = "shelf"

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(f"{self.name}: {query}")]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self._get_relevant_documents(query, run_manager=run_manager)


def _models(bind: Callable[[Any], Any]) -> Any:
    """Return a chain of two independent calls and one that needs both."""
    ask, server = ChatPromptTemplate.from_template, Server()
    one, two, three = (bind(Model(server=server, label=label)) for label in ("one", "two", "three"))
    return (
        RunnablePassthrough.assign(a=ask("first {q}") | one | StrOutputParser())
        | RunnablePassthrough.assign(b=ask("second {q}") | two | StrOutputParser())
        | ask("{a} {b}")
        | three
        | StrOutputParser()
    )


def _retrievers() -> Any:
    read = RunnablePassthrough.assign(a=QUESTION | Shelf(name="one"))
    return read | RunnablePassthrough.assign(b=QUESTION | Shelf(name="two"))


CHAINS: dict[str, Callable[[], Any]] = {
    "models": lambda: _models(lambda model: model),
    "bound": lambda: _models(lambda model: model.bind(stop=["x"])),
    "retries": lambda: _models(lambda model: model.with_retry()),
    "fallbacks": lambda: _models(lambda model: model.with_fallbacks([Model(label="other")])),
    "retrievers": _retrievers,
    "a composite": lambda: QUESTION | MergerRetriever(retrievers=[Shelf(name="a"), Shelf(name="b")]),
}


async def _all(items: Any) -> list[Any]:
    return [item async for item in items]


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda chain: chain.invoke(INPUT),
    "ainvoke": lambda chain: asyncio.run(chain.ainvoke(INPUT)),
    "stream": lambda chain: list(chain.stream(INPUT)),
    "astream": lambda chain: asyncio.run(_all(chain.astream(INPUT))),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", CHAINS)
def test_global_tracer_records_only_the_runs_of_the_original(tracer: Tracer, name: str, entry: str) -> None:
    chain = CHAINS[name]()
    recorded_runs = []
    for runnable in (chain, accelerate(chain, concurrent=[Model, Shelf])):
        tracer.ended.clear()
        ENTRIES[entry](runnable)
        recorded_runs.append(Counter(tracer.ended))
    assert recorded_runs[0]
    assert recorded_runs[1] == recorded_runs[0]
