"""Tests of `accelerate(model)`: the result has the model's class and all of its methods."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from differential.recording import WAYS, observe
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import tool
from support.own_leaves import Chat, Ledger, Text
from support.scripted_llm import ScriptedLLM
from support.small_chains import ask, wait_for_report

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.llm import TeolaLLM
from teola_plugin.adapters.langchain.shadow import ShadowReport
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

QUESTION = "what is a primitive?"


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


class Provider(Chat):
    max_tokens: int | None = 8


def models(pool: EnginePool) -> dict[str, Any]:
    return {
        "chat": ChatTeola(pool=pool, max_tokens=6),
        "text": TeolaLLM(pool=pool, max_tokens=6),
        "own chat": Provider(),
        "own text": Text(),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chat", "text", "own chat", "own text"])
def test_accelerated_model_gives_the_same_results_at_every_entry_point(fakes: EnginePool, name: str, way: str) -> None:
    model = models(fakes)[name]
    fast = accelerate(model)
    assert isinstance(fast, type(model)) and type(fast).__name__ == type(model).__name__
    plain, accelerated = observe(model, way, QUESTION), observe(fast, way, QUESTION)
    assert accelerated.result == plain.result and accelerated.events == plain.events
    assert accelerated.prompts == plain.prompts


def test_accelerated_model_has_report_explain_and_trace(fakes: EnginePool) -> None:
    model = ChatTeola(pool=fakes, max_tokens=6)
    fast = accelerate(model, app="mine")
    fast.invoke(QUESTION)
    assert fast.original is model and fast.chain is model and not fast.gains
    assert "optimized  chain  ChatTeola" in str(fast.report().parts) and "PREFILLING@llm" in fast.explain(details=True)
    trace = fast.last_trace()
    assert trace is not None and trace.app == "mine" and [span.engine for span in trace.spans] == ["llm"]
    with pytest.raises(AttributeError, match="nothing"):
        fast.nothing  # noqa: B018


def test_create_agent_accepts_an_accelerated_model(llm_pool: EnginePool, llm: ScriptedLLM) -> None:
    def answer(request: Any) -> str:
        called = request.prompt.messages[-1].role == "tool"
        return "done" if called else '{"name": "add", "arguments": {"a": 1, "b": 2}}'

    llm.answer = answer
    model = ChatTeola(pool=llm_pool)
    given = {"messages": [("user", "1 + 2?")]}
    plain, fast = (create_agent(one, [add]).invoke(given) for one in (model, accelerate(model)))
    messages = [(m.type, m.content, [c["args"] for c in getattr(m, "tool_calls", [])]) for m in plain["messages"]]
    assert messages[1][2] == [{"a": 1, "b": 2}] and messages[2][:2] == ("tool", "3")
    assert [
        (m.type, m.content, [c["args"] for c in getattr(m, "tool_calls", [])]) for m in fast["messages"]
    ] == messages


def test_accelerated_model_keeps_the_methods_of_its_class(fakes: EnginePool) -> None:
    model = ChatTeola(pool=fakes, max_tokens=6)
    fast = accelerate(model)
    schema = {"title": "x", "type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    assert fast.bind_tools([add]).invoke(QUESTION).content == model.bind_tools([add]).invoke(QUESTION).content
    plain, made = model.with_structured_output(schema), fast.with_structured_output(schema)
    assert made.first.kwargs == plain.first.kwargs and made.first.bound is fast
    [[generation]] = fast.generate([[HumanMessage(QUESTION)]]).generations
    assert generation.text == model.invoke(QUESTION).content
    fields = fast.configurable_fields(max_tokens=ConfigurableField(id="m"))
    assert fields.invoke(QUESTION, {"configurable": {"m": 2}}).usage_metadata["output_tokens"] == 2


def test_accelerated_bound_model_keeps_its_class(fakes: EnginePool) -> None:
    mine = Provider(ledger=Ledger())
    fast = accelerate(mine, pool=fakes, bind=[(mine, "llm")])
    assert isinstance(fast, Provider) and fast.original is mine
    assert fast.invoke(QUESTION).content == ChatTeola(pool=fakes, max_tokens=8).invoke(QUESTION).content
    assert fast.bind(max_tokens=2).invoke(QUESTION).content and not mine.ledger.calls
    trace = fast.last_trace()
    assert trace is not None and [span.engine for span in trace.spans] == ["llm"]


def test_call_with_arguments_sends_one_request(llm_pool: EnginePool, llm: ScriptedLLM) -> None:
    """A call with arguments must not be prefetched without them."""
    fast = accelerate(ChatTeola(pool=llm_pool))
    fast.invoke(QUESTION, stop=["x"], max_tokens=3)
    fast.bind(max_tokens=4).invoke(QUESTION)
    RunnableLambda(lambda text: fast.invoke(text, max_tokens=5)).invoke(QUESTION)
    assert [request.sampling.max_tokens for request in llm.requests] == [3, 4, 5]


def test_accelerated_model_in_an_accelerated_chain_is_lowered(llm_pool: EnginePool, llm: ScriptedLLM) -> None:
    fast = accelerate(ChatTeola(pool=llm_pool))
    chain = ask("first {question}", fast) | ask("then {question}", fast)
    whole = accelerate(chain)
    assert [row.level for row in whole.report().parts.nodes] == ["lowered"] * 6
    assert whole.invoke({"question": "a"}) == chain.invoke({"question": "a"})
    assert len(llm.requests) == 4, "each party of a query asks once, and what was asked early is claimed"


def test_accelerated_model_in_user_code_joins_the_live_query(llm_pool: EnginePool, llm: ScriptedLLM) -> None:
    fast = accelerate(ChatTeola(pool=llm_pool))
    whole = accelerate(RunnableLambda(lambda text: fast.invoke(text)), pool=llm_pool)
    whole.invoke(QUESTION)
    trace = whole.last_trace()
    assert trace is not None and [span.engine for span in trace.spans if span.engine] == ["llm"]
    assert len(llm.requests) == 1 and fast.last_trace() is None


def test_accelerated_model_shares_its_state_with_the_original(fakes: EnginePool) -> None:
    model = ChatTeola(pool=fakes, max_tokens=6)
    fast = accelerate(model)
    fast.max_tokens = 2
    assert model.max_tokens == 2 and fast.invoke(QUESTION).usage_metadata["output_tokens"] == 2
    order = FakeListChatModel(responses=["a", "b"])
    assert [accelerate(order).invoke("x").content, order.invoke("x").content] == ["a", "b"]


def test_copies_of_accelerated_models_keep_class_options_and_engine(fakes: EnginePool) -> None:
    model = ChatTeola(pool=fakes, max_tokens=6)
    mine = Provider(ledger=None)
    for fast in (accelerate(model, app="mine"), accelerate(mine, pool=fakes, bind=[(mine, "llm")], app="mine")):
        for made in (copy.copy(fast), copy.deepcopy(fast), fast.model_copy(update={"max_tokens": 2})):
            assert isinstance(made, type(fast.original)) and made is not fast and made.original is not model
            tokens = 2 if made.max_tokens == 2 else fast.max_tokens
            assert made.invoke(QUESTION).usage_metadata["output_tokens"] == tokens
            trace = made.last_trace()
            assert trace is not None and trace.app == "mine"
        with pytest.raises(RegistrationError, match="cannot be pickled: its engines live in this process"):
            pickle.dumps(fast)
    own = pickle.loads(pickle.dumps(accelerate(FakeListChatModel(responses=["a"]))))
    assert own.invoke("x").content == "a" and own.report is not None


def test_accelerating_an_accelerated_model_keeps_the_original(fakes: EnginePool) -> None:
    model = ChatTeola(pool=fakes, max_tokens=6)
    twice = accelerate(accelerate(model), app="other")
    assert twice.original is model and twice.invoke(QUESTION).content == model.invoke(QUESTION).content
    trace = twice.last_trace()
    assert trace is not None and trace.app == "other"


def test_accelerated_model_compares_shadow_calls(fakes: EnginePool) -> None:
    fast = accelerate(ChatTeola(pool=fakes), shadow=1.0)
    fast.invoke(QUESTION)
    assert wait_for_report(fast, 1) == ShadowReport(compared=1)
