"""Tests that errors of a server reach the caller of a bound object as they come from the object itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
NOWHERE = "http://127.0.0.1:9/v1"
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "timeout": ("slowly", {"timeout": 0.2}),
    "400": ("refuse", {}),
    "401": ("status 401", {}),
    "404": ("status 404", {}),
    "429": ("status 429", {}),
    "500": ("status 500", {}),
    "no server": ("hello", {"url": NOWHERE}),
    "too long": ("too long", {}),
    "nonsense": ("nonsense", {}),
}


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as made:
        yield made


@pytest.fixture(scope="module", params=[False, True], ids=["carried", "own"])
def pool(stub: OpenAIStub, request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    here = OpenAIServer("llm", base_url=stub.base_url, model=MODEL, dedicated=request.param, calibrate=False)
    with EnginePool.local([here, OpenAIServer("gone", base_url=NOWHERE, model=MODEL, check=False)]) as made:
        yield made


async def _all(items: Any) -> list[Any]:
    return [one async for one in items]


async def _listed(made: Any) -> list[Any]:
    return await _all(await made)


CHAT: dict[str, Callable[[Any, str], Any]] = {
    "invoke": lambda model, text: model.invoke(text),
    "ainvoke": lambda model, text: asyncio.run(model.ainvoke(text)),
    "stream": lambda model, text: list(model.stream(text)),
    "astream": lambda model, text: asyncio.run(_all(model.astream(text))),
}
LLM: dict[str, Callable[[Any, str], Any]] = {
    "chat": lambda model, text: model.chat([ChatMessage(text)]),
    "achat": lambda model, text: asyncio.run(model.achat([ChatMessage(text)])),
    "stream_chat": lambda model, text: list(model.stream_chat([ChatMessage(text)])),
    "astream_chat": lambda model, text: asyncio.run(_listed(model.astream_chat([ChatMessage(text)]))),
}


def raised(ask: Callable[[Any, str], Any], model: Any, text: str) -> Any:
    """Return the class and the text of the exception, or the result if there was none."""
    try:
        return ask(model, text)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", CHAT)
def test_bound_langchain_chat_model_raises_the_originals_errors(
    stub: OpenAIStub, pool: EnginePool, way: str, fault: str
) -> None:
    text, options = FAULTS[fault]
    given = {"base_url": options.get("url", stub.base_url), "timeout": options.get("timeout", 20.0)}
    own = ChatOpenAI(model=MODEL, api_key="none", max_retries=0, temperature=0.0, **given)  # type: ignore[arg-type]
    engine = "gone" if "url" in options else "llm"
    fast = accelerate(own | RunnableLambda(lambda found: found), pool=pool, bind=[(own, engine)])
    assert raised(CHAT[way], fast, text) == raised(CHAT[way], own, text)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", LLM)
def test_bound_llamaindex_llm_raises_the_originals_errors(
    stub: OpenAIStub, pool: EnginePool, way: str, fault: str
) -> None:
    text, options = FAULTS[fault]
    given: dict[str, Any] = {"api_base": options.get("url", stub.base_url), "timeout": options.get("timeout", 20.0)}
    own = OpenAILike(model=MODEL, api_key="none", is_chat_model=True, max_retries=0, **given)
    served = pool.bound(own, "gone" if "url" in options else "llm")
    assert raised(LLM[way], served, text) == raised(LLM[way], own, text)


# ------------------------------------------------------------ what differs, as the pages say


class _Broken:
    """A model that raises."""

    device, prompts = "cpu", {}

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def parameters(self) -> list[Any]:
        return []

    buffers = parameters

    def encode_query(self, *_: Any, **__: Any) -> Any:
        raise ValueError("the card is on fire")

    encode_document = encode_query


def test_error_of_a_local_model_is_in_the_engine_error() -> None:
    pytest.importorskip("torch", reason="needs models")
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine
    from teola_plugin.langchain import TeolaEmbeddings

    pool = EnginePool.local({"embedder": EmbeddingEngine(model=_Broken(), dedicated=False)})  # type: ignore[arg-type]
    with pool, pytest.raises(EngineError, match="the model raised ValueError: the card is on fire"):
        TeolaEmbeddings(pool=pool).embed_query("hello")
    with pytest.raises(EngineUnavailable, match="pool"):
        TeolaEmbeddings(pool=pool).embed_query("hello")
