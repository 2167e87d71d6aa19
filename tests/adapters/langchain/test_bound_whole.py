"""Tests that `bind=` routes an object wherever a chain or a graph holds it, and that chains can share one list."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import END, START, StateGraph
from support.own_leaves import Chat, Ledger, SyncChat
from test_bind import Words

from teola_plugin import accelerate, uninstall
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
QUESTION = {"question": "what is a primitive?"}


def ask(model: Any) -> Chain:
    return ChatPromptTemplate.from_template("{question}") | model | StrOutputParser()


GLOBAL = Chat(ledger=Ledger())


def named_globally(value: Any) -> Any:
    return GLOBAL.invoke(str(value))


def inner(value: Any) -> Any:
    return named_globally(value)


class Helper:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, value: Any) -> Any:
        return self.model.invoke(str(value))

    def judged(self, value: Any) -> Any:
        return self.model.invoke(str(value))


class Holder(Runnable[Any, Any]):
    """A class that holds a model and is no Pydantic model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.model.invoke(str(input), config)


def in_default(model: Any) -> Any:
    def judged(value: Any, model: Any = model) -> Any:
        return model.invoke(str(value))

    return judged


def in_tool(model: Any) -> Any:
    @tool
    def judged(value: str) -> str:
        """Judge."""
        return str(model.invoke(value).content)

    return lambda value: judged.invoke({"value": str(value)})


def in_attribute_of_a_function(model: Any) -> Any:
    def judged(value: Any) -> Any:
        return judged.model.invoke(str(value))  # type: ignore[attr-defined]

    judged.model = model  # type: ignore[attr-defined]
    return judged


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda model: lambda value: model.invoke(str(value)),
    "chain in a closure": lambda model: (lambda chain: lambda value: chain.invoke({"question": value}))(ask(model)),
    "default": in_default,
    "partial": lambda model: partial(lambda model, value: model.invoke(str(value)), model),
    "bound method": lambda model: Helper(model).judged,
    "callable": lambda model: RunnableLambda(Helper(model).__call__),
    "global": lambda model: named_globally,
    "helper": lambda model: inner,
    "attribute": Holder,
    "tool": in_tool,
    "attribute of a function": in_attribute_of_a_function,
}


@pytest.mark.parametrize("where", HOLDERS)
@pytest.mark.parametrize("occurs_in_the_chain", [True, False])
def test_bound_model_uses_the_engine_wherever_it_is_stored(
    fakes: EnginePool, where: str, occurs_in_the_chain: bool
) -> None:
    model = GLOBAL if where in ("global", "helper") else Chat(ledger=Ledger())
    model.ledger.calls.clear()
    holder = HOLDERS[where](model)
    runnable: Chain = holder if isinstance(holder, Runnable) else RunnableLambda(holder)
    chain = RunnablePassthrough.assign(answer=ask(model)) | runnable if occurs_in_the_chain else runnable

    fast = accelerate(chain, pool=fakes, bind=[(model, "llm")])

    assert fast.invoke(QUESTION)
    assert not model.ledger.calls


def test_bound_model_outside_the_accelerated_chain_skips_the_engine(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    chain = ask(model)
    accelerate(chain, pool=fakes, bind=[(model, "llm")]).invoke(QUESTION)

    assert chain.invoke(QUESTION) == "model(what is a primitive?)"
    assert model.invoke("hi").content == "model(hi)"
    assert model.ledger.calls == {"model: what is a primitive?": 1, "model: hi": 1}


def test_overridden_invoke_of_a_bound_model_still_runs(fakes: EnginePool) -> None:
    """Code of the user's class above its provider method runs."""

    class Polite(Chat):
        def invoke(self, input: Any, *args: Any, **kwargs: Any) -> Any:
            return super().invoke(f"please: {input.to_messages()[-1].content}", *args, **kwargs)

    model = Polite(ledger=Ledger())
    fast = accelerate(ask(model), pool=fakes, bind=[(model, "llm")])
    same = ChatTeola(pool=fakes).invoke("please: what is a primitive?")

    assert fast.chain is fast.original
    assert fast.invoke(QUESTION) == same.content


def test_bound_model_uses_the_engine_in_steps_and_functions(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    served = fakes.bound(model, "llm")
    chain = RunnablePassthrough.assign(answer=ask(served)) | RunnableLambda(
        lambda value: served.invoke(value["answer"])
    )
    assert accelerate(chain, pool=fakes).invoke(QUESTION).content
    assert not model.ledger.calls


def test_function_that_reads_a_bound_store_returns_the_same_result(fakes: EnginePool) -> None:
    words = Words()
    store = InMemoryVectorStore(words)
    store.add_documents([Document("lambs eat grass"), Document("walls need lime")])
    chain = RunnablePassthrough.assign(found=(lambda x: x["question"]) | store.as_retriever()) | RunnableLambda(
        lambda value: len(store.store) + len(value["found"])
    )
    assert accelerate(chain, pool=fakes, bind=[(words, "embedder")]).invoke(QUESTION) == chain.invoke(QUESTION)


def test_bound_model_uses_the_engine_in_graph_nodes(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    graph = StateGraph(dict)
    graph.add_node("chain", ask(model) | RunnableLambda(lambda text: {"question": text}))
    graph.add_node("function", lambda state: {"question": model.invoke(state["question"]).content})
    graph.add_edge(START, "chain")
    graph.add_edge("chain", "function")
    graph.add_edge("function", END)

    fast = accelerate(graph.compile(), pool=fakes, bind=[(model, "llm")])

    assert fast.invoke(QUESTION)
    assert list(fast.stream(QUESTION))
    assert not model.ledger.calls


def test_one_bind_list_serves_several_chains_if_not_strict(fakes: EnginePool) -> None:
    one, other, words = Chat(ledger=Ledger()), Chat(ledger=Ledger()), Words()
    bind = [(one, "llm"), (other, "llm"), (words, "embedder")]
    for model in (one, other):
        fast = accelerate(ask(model), pool=fakes, bind=bind, strict=False)
        assert fast.invoke(QUESTION) and not model.ledger.calls
    with pytest.raises(RegistrationError, match="does not occur"):
        accelerate(ask(one), pool=fakes, bind=bind)


def test_chain_without_bound_objects_runs_unchanged_if_not_strict(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    fast = accelerate(ask(model), pool=fakes, bind=[(Words(), "embedder")], strict=False)
    assert fast.invoke(QUESTION) == ask(model).invoke(QUESTION)
    assert accelerate(model, pool=fakes, bind=[(Words(), "embedder")], strict=False).invoke("why?")


# ------------------------------------------------------------ objects that do not exist yet


def test_bound_class_routes_all_its_instances_to_the_engine(fakes: EnginePool) -> None:
    class Mine(Chat):
        pass

    ledger = Ledger()
    chain = RunnableLambda(lambda value: Mine(ledger=ledger).invoke(value["question"]).content)

    assert accelerate(chain, pool=fakes, bind={Mine: "llm"}).invoke(QUESTION)
    assert not ledger.calls
    chain.invoke(QUESTION)
    assert ledger.calls


def test_subclass_of_a_bound_class_defined_later_uses_the_engine(fakes: EnginePool) -> None:
    """A node may import such a class. The engine serves it from the next call on."""
    classes: list[Any] = []
    ledger = Ledger()
    chain = RunnableLambda(lambda value: classes[0](ledger=ledger).invoke(value["question"]).content)
    fast = accelerate(chain, pool=fakes, bind={Chat: "llm"})

    class Later(Chat):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            return super()._generate(*args, **kwargs)

    classes.append(Later)

    assert fast.invoke(QUESTION)
    assert "".join(fast.stream(QUESTION))
    assert not ledger.calls


def test_model_created_by_configurable_fields_uses_the_engine(fakes: EnginePool) -> None:
    class Sized(Chat):
        max_tokens: int = 8

    model = Sized(ledger=Ledger())
    chain = ChatPromptTemplate.from_template("{question}") | model.configurable_fields(
        max_tokens=ConfigurableField(id="m")
    )
    fast = accelerate(chain, pool=fakes, bind=[(model, "llm")])

    answer = fast.invoke(QUESTION, {"configurable": {"m": 2}})

    assert answer.usage_metadata["output_tokens"] == 2
    assert not model.ledger.calls


def test_instances_of_a_bound_class_are_garbage_collected(fakes: EnginePool) -> None:
    class Mine(Chat):
        pass

    chain = RunnableLambda(lambda value: Mine().invoke(value["question"]).content)
    fast = accelerate(chain, pool=fakes, bind={Mine: "llm"})
    for _ in range(3):
        fast.invoke(QUESTION)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Mine]


# ------------------------------------------------------------ methods that a class inherits


async def test_bound_sync_model_gets_async_methods(fakes: EnginePool) -> None:
    model = SyncChat(ledger=Ledger())
    words = Words()
    fast = accelerate(ask(model), pool=fakes, bind=[(model, "llm")])
    routed = fakes.bound(words, "embedder")

    assert await fast.ainvoke(QUESTION) == fast.invoke(QUESTION)
    assert await routed.aembed_query("x") == words.embed_query("x")
    assert "_agenerate" in vars(SyncChat) and "aembed_query" in vars(Words)
    assert not model.ledger.calls


async def test_uninstall_removes_added_async_methods(fakes: EnginePool) -> None:
    model, words = SyncChat(ledger=Ledger()), Words()
    fast = accelerate(ask(model), pool=fakes, bind=[(model, "llm")])
    fakes.bound(words, "embedder")

    uninstall()

    assert "_agenerate" not in vars(SyncChat) and "aembed_query" not in vars(Words)
    assert SyncChat._agenerate is BaseChatModel._agenerate
    assert Words.aembed_query is Embeddings.aembed_query
    assert await fast.ainvoke(QUESTION) == "model(what is a primitive?)"
    assert accelerate(ask(model), pool=fakes, bind=[(model, "llm")]).invoke(QUESTION) != "model(what is a primitive?)"
