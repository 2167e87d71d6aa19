"""The schemes that are compared: how an application is run, in which order engines serve, whether prefixes are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.apps import haystack_pipelines
from benchmarks.apps.messages import MESSAGES
from benchmarks.apps.pipelines import PIPELINES, Found, Given, Kit
from benchmarks.apps.script import SCRIPTS
from examples.apps import advanced_rag, agent, contextual_retrieval, naive_rag, search_engine
from examples.apps.engines import fake_pool
from examples.apps.runner import COLLECTION, App
from teola_plugin import EnginePool, accelerate

PO, TO = "per-invocation", "throughput-oriented"
APPS: dict[str, App] = {
    one.name: one for one in (search_engine.APP, agent.APP, naive_rag.APP, advanced_rag.APP, contextual_retrieval.APP)
}
UPLOADS = ("naive_rag", "advanced_rag", "contextual_retrieval")
Told = tuple[str, tuple[str, ...]]
"""An answer, and the texts of its sources."""
Ask = Callable[[Given], Awaitable[Told]]


@dataclass(frozen=True, slots=True)
class Scheme:
    """`how`: a way of `pipelines`, `messages`, `script`, `haystack`, `object` (the app as it is) or `accelerated`."""

    name: str
    how: str
    policy: str
    caching: bool

    def takes(self, app: str) -> bool:
        if self.how == "haystack":
            return haystack_pipelines.installed()
        return self.how != "messages" or app in MESSAGES

    def pool(self, scale: float) -> EnginePool:
        """Two replicas of each LLM, one of everything else, as in the paper."""
        return fake_pool(agent.TOOLS, factor=scale, policy=self.policy, prefix_caching=self.caching, llms=2)

    def ask(self, app: App, pool: EnginePool, *, proxy: str = "proxy", collection: str = COLLECTION) -> Ask:
        """How one query is asked. `proxy`: the engine of the small model; `collection`: where uploads go."""
        if self.how in ("object", "accelerated"):
            own = {"collection": collection} if app.name in UPLOADS else {}
            made = app.make(pool, proxy=proxy, **own)
            return _of_object(app, accelerate(made) if self.how == "accelerated" else made)
        return _of_pipeline(app.name, self.how, Kit(pool, proxy, collection))


def _of_object(app: App, made: Any) -> Ask:
    async def ask(given: Given) -> Told:
        result = await made.ainvoke(given)
        if app.name == "agent":
            return result["answer"], tuple(str(message.content) for message in agent.results(result["messages"]))
        return result["answer"], _texts(result.get("sources", ()))

    return ask


def _of_pipeline(name: str, how: str, kit: Kit) -> Ask:
    pipeline = _pipeline(name, how, kit)

    async def ask(given: Given) -> Told:
        answer, sources = await pipeline(given)
        return answer, _texts(sources)

    return ask


def _pipeline(name: str, how: str, kit: Kit) -> Callable[[Given], Awaitable[Found]]:
    if how == "messages":
        return partial(MESSAGES[name], kit)
    if how == "script":
        return partial(SCRIPTS[name], kit)
    if how == "haystack":
        return partial(haystack_pipelines.asked, haystack_pipelines.FLOWS[name](kit))
    return partial(PIPELINES[name], kit, way=how)  # type: ignore[call-arg]


def _texts(documents: Sequence[Any]) -> tuple[str, ...]:
    return tuple(document.page_content for document in documents)


SCHEMES: tuple[Scheme, ...] = (
    Scheme("LlamaDist-PO", "modules", PO, False),
    Scheme("LlamaDist-TO", "modules", TO, False),
    Scheme("LlamaDistPC-PO", "parallel", PO, True),
    Scheme("LlamaDistPC-TO", "parallel", TO, True),
    Scheme("AutoGen-PO", "messages", PO, False),
    Scheme("AutoGen-TO", "messages", TO, False),
    Scheme("script", "script", TO, True),
    Scheme("Haystack", "haystack", TO, True),
    Scheme("modern", "modern", TO, True),
    Scheme("object", "object", TO, True),
    Scheme("accelerated", "accelerated", "topology-aware", True),
)
"""LLM replicas are chosen by prefix and load in all of them: that is the pool's."""


def left_out() -> list[str]:
    """Why schemes are not compared on this machine."""
    return [] if haystack_pipelines.installed() else [haystack_pipelines.INSTALL]
