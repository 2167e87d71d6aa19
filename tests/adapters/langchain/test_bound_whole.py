"""`bind=`: an object is bound wherever a chain holds it, or not at all; and one list may serve several chains."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import END, START, StateGraph
from support.own_leaves import Chat, Ledger
from test_bind import Words

from teola_plugin import accelerate
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
QUESTION = {"question": "what is a primitive?"}


def ask(model: Any) -> Chain:
    return ChatPromptTemplate.from_template("{question}") | model | StrOutputParser()


GLOBAL = Chat(ledger=Ledger())


def named_globally(value: Any) -> Any:
    return GLOBAL.invoke(value)


def inner(value: Any) -> Any:
    return named_globally(value)


class Helper:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, value: Any) -> Any:
        return self.model.invoke(value)

    def judged(self, value: Any) -> Any:
        return self.model.invoke(value)


class Holder(Runnable[Any, Any]):
    """No Pydantic object: its attributes are not looked into by `bind=`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.model.invoke(input, config)


def in_default(model: Any) -> Any:
    def judged(value: Any, model: Any = model) -> Any:
        return model.invoke(value)

    return judged


HELD: dict[str, tuple[Any, str]] = {
    "closure": (lambda model: lambda value: model.invoke(value), "lambda"),
    "chain in a closure": (lambda model: (lambda chain: lambda value: chain.invoke(value))(ask(model)), "lambda"),
    "default": (in_default, "judged"),
    "partial": (lambda model: partial(lambda model, value: model.invoke(value), model), "lambda"),
    "bound method": (lambda model: Helper(model).judged, r"Helper\.judged"),
    "callable": (lambda model: RunnableLambda(Helper(model).__call__), r"Helper\.__call__"),
    "global": (lambda model: named_globally, "named_globally"),
    "helper": (lambda model: inner, "named_globally"),
    "attribute": (Holder, "a Holder"),
}


@pytest.mark.parametrize("where", HELD)
@pytest.mark.parametrize("strict", [True, False])
def test_never_in_part(fakes: EnginePool, where: str, strict: bool) -> None:
    model = GLOBAL if where in ("global", "helper") else Chat(ledger=Ledger())
    make, said = HELD[where]
    made = make(model)
    chain = RunnablePassthrough.assign(answer=ask(model)) | (
        made if isinstance(made, Runnable) else RunnableLambda(made)
    )
    with pytest.raises(RegistrationError, match=said) as caught:
        accelerate(chain, pool=fakes, bind=[(model, "llm")], strict=strict)
    assert "pool.bound(model, engine)" in (caught.value.hint or "")


def test_the_copy_in_its_place_is_bound_whole(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    served = fakes.bound(model, "llm")
    chain = RunnablePassthrough.assign(answer=ask(served)) | RunnableLambda(
        lambda value: served.invoke(value["answer"])
    )
    assert accelerate(chain, pool=fakes).invoke(QUESTION).content
    assert not model.ledger.calls


def test_stores_and_other_functions_are_no_reason(fakes: EnginePool) -> None:
    """A store embeds its documents by itself, whoever holds it."""
    words = Words()
    store = InMemoryVectorStore(words)
    store.add_documents([Document("lambs eat grass"), Document("walls need lime")])
    chain = RunnablePassthrough.assign(found=(lambda x: x["question"]) | store.as_retriever()) | RunnableLambda(
        lambda value: len(store.store) + len(value["found"])
    )
    assert accelerate(chain, pool=fakes, bind=[(words, "embedder")]).invoke(QUESTION) == chain.invoke(QUESTION)


def test_nodes_of_a_graph_are_bound_whole(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    graph = StateGraph(dict)
    graph.add_node("chain", ask(model) | RunnableLambda(lambda text: {"question": text}))
    graph.add_node("function", lambda state: {"question": model.invoke(state["question"]).content})
    graph.add_edge(START, "chain")
    graph.add_edge("chain", "function")
    graph.add_edge("function", END)
    with pytest.raises(RegistrationError, match="also held by the function"):
        accelerate(graph.compile(), pool=fakes, bind=[(model, "llm")])


def test_one_list_serves_several_chains(fakes: EnginePool) -> None:
    one, other, words = Chat(ledger=Ledger()), Chat(ledger=Ledger()), Words()
    bind = [(one, "llm"), (other, "llm"), (words, "embedder")]
    for model in (one, other):
        fast = accelerate(ask(model), pool=fakes, bind=bind, strict=False)
        assert fast.invoke(QUESTION) and not model.ledger.calls
    with pytest.raises(RegistrationError, match="does not occur"):
        accelerate(ask(one), pool=fakes, bind=bind)


def test_without_any_of_them_it_runs_as_it_is(fakes: EnginePool) -> None:
    model = Chat(ledger=Ledger())
    fast = accelerate(ask(model), pool=fakes, bind=[(Words(), "embedder")], strict=False)
    assert fast.invoke(QUESTION) == ask(model).invoke(QUESTION)
    assert accelerate(model, pool=fakes, bind=[(Words(), "embedder")], strict=False).invoke("why?")
