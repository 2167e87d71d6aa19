"""Tests of sync models and graphs whose calls start together: usage, saved state, tokens, nodes and streams."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_classic.chains import LLMChain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, StateGraph
from support.event_order import EventOrder
from support.own_composites import (
    OWN,
    Counted,
    Lines,
    extractor,
    queries,
    texts,
)
from support.own_leaves import Chat, Ledger, Text

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.composite_calls import CompositeRules, Threads, intercept_composite_methods
from teola_plugin.adapters.langchain.started_calls import under_rules
from teola_plugin.adapters.thread_safety import ThreadSafety

# ------------------------------------------------------------ models


def side_by_side(*named: Any) -> Any:
    """Prefetch calls of composites in the body, with these objects or classes named in `concurrent=`."""
    intercept_composite_methods()
    return under_rules(CompositeRules([], Threads(ThreadSafety(named))))


class Tells(Counted):
    """Tells of tokens by itself, and asks another model on the way."""

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        result = super()._generate(messages, stop, run_manager, **kwargs)
        if run_manager is not None:
            run_manager.on_llm_new_token("a token")
        return result


def test_tokens_of_concurrent_calls_reach_their_own_runs() -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.runs: list[Any] = []
            self.tokens: list[Any] = []

        def on_chat_model_start(self, *_: Any, run_id: Any, **__: Any) -> None:
            self.runs.append(run_id)

        def on_llm_new_token(self, token: str, *, run_id: Any, **__: Any) -> None:
            self.tokens.append(run_id)

    tokens = Tokens()
    chain = LLMChain(llm=Tells(), prompt=PromptTemplate.from_template("Of {x}"))
    with side_by_side(Tells):
        chain.apply([{"x": i} for i in range(4)], callbacks=[tokens])
    assert tokens.tokens == tokens.runs
    assert len(tokens.runs) == 4


def test_messages_of_concurrent_calls_have_the_ids_of_their_runs() -> None:
    class Ends(BaseCallbackHandler):
        def __init__(self) -> None:
            self.ids: list[bool] = []

        def on_llm_end(self, response: Any, *, run_id: Any, **_: Any) -> None:
            self.ids.append(str(run_id) in response.generations[0][0].message.id)

    ends = Ends()
    with side_by_side(Chat):
        LLMChain(llm=Chat(), prompt=PromptTemplate.from_template("Of {x}")).apply(
            [{"x": i} for i in range(4)], callbacks=[ends]
        )
    assert ends.ids == [True] * 4


def test_attributes_set_during_concurrent_calls_stay_on_the_model() -> None:
    class Counts(Chat):
        requests: int = 0

        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            self.requests += 1
            return super()._generate(messages, stop, run_manager, **kwargs)

    model = Counts()
    chain = LLMChain(llm=model, prompt=PromptTemplate.from_template("Of {x}"))
    with side_by_side(model):
        chain.apply([{"x": i} for i in range(4)])
    assert model.requests == 4


# ------------------------------------------------------------ text models on a loop


def test_async_text_model_overlaps_on_a_loop_without_concurrent_option() -> None:
    plain, fast = Ledger(), Ledger(meet=3)
    expected = asyncio.run(texts(plain).ainvoke("q"))
    assert asyncio.run(accelerate(texts(fast)).ainvoke("q")) == expected
    assert (plain.most_at_once, fast.most_at_once, fast.calls) == (1, 3, plain.calls)


def test_sync_text_model_overlaps_only_with_concurrent_option() -> None:
    class Plain(Lines):
        ledger: Any

        def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
            self.ledger.work(prompt)
            return prompt

    for named, most in (((), 1), ((Plain,), 3)):
        ledger = Ledger(meet=3) if named else Ledger(jitter=0.002)
        chain = PromptTemplate.from_template("Of {x}") | Plain(ledger=ledger)
        fast = accelerate(chain.map(), concurrent=named)
        assert asyncio.run(fast.ainvoke([{"x": 1}, {"x": 2}, {"x": 3}])) == ["Of 1", "Of 2", "Of 3"]
        assert ledger.most_at_once == most


class TellsText(Text):
    wrong: str = ""

    async def _acall(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        text = await super()._acall(prompt)
        await run_manager.on_llm_new_token(prompt)
        if prompt == self.wrong:
            raise ValueError(f"no {prompt}")
        return text


@pytest.mark.parametrize("wrong", ["", "a", "b", "c"])
def test_tokens_and_errors_of_a_batch_keep_the_originals_order(wrong: str) -> None:
    class Heard(EventOrder):
        def on_llm_new_token(self, token: str, *, run_id: Any, **_: Any) -> None:
            self._hear("token", token)

    def seen(model: Any) -> tuple[Any, list[str]]:
        order = Heard()
        try:
            found = asyncio.run(model.abatch(["a", "b", "c", "a"], {"callbacks": [order]}))
        except ValueError as error:
            found = str(error)
        return found, order.events

    before, after = Ledger(), Ledger(jitter=0.01)
    plain = seen(TellsText(wrong=wrong, ledger=before))
    with side_by_side():
        assert seen(TellsText(wrong=wrong, ledger=after)) == plain
    assert after.calls == before.calls if not wrong else after.calls.total() <= 4


def test_cancelled_batch_leaves_no_call_running() -> None:
    async def given_up() -> int:
        ledger = Ledger(meet=9)
        with side_by_side():
            task = asyncio.create_task(Text(ledger=ledger).abatch(["a", "b", "c"]))
        while ledger.now < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        return ledger.now

    assert asyncio.run(given_up()) == 0


# ------------------------------------------------------------ graphs


def test_composite_calls_of_graph_nodes_overlap() -> None:
    def compiled(ledger: Ledger) -> Any:
        graph = StateGraph(dict)
        found = RunnableLambda(lambda state: state["q"]) | queries(ledger) | (lambda found: {"found": len(found)})
        graph.add_node("find", found)
        graph.add_edge(START, "find")
        graph.add_edge("find", END)
        return graph.compile()

    plain, fast = Ledger(), Ledger(meet=3)
    expected = compiled(plain).invoke({"q": "x"})
    assert accelerate(compiled(fast), concurrent=OWN).invoke({"q": "x"}) == expected
    assert (fast.most_at_once >= 3, fast.calls) == (True, plain.calls)


def test_streamed_composite_calls_are_prefetched_as_streams() -> None:

    def compiled(ledger: Ledger) -> Any:
        graph = StateGraph(dict)
        graph.add_node("find", RunnableLambda(lambda state: state["q"]) | extractor(ledger) | (lambda found: {"n": 1}))
        graph.add_edge(START, "find")
        return graph.compile()

    def seen(graph: Any) -> list[str]:
        return [chunk.content for chunk, _ in graph.stream({"q": "x"}, stream_mode="messages")]

    plain, fast = Ledger(), Ledger(meet=3)
    assert seen(accelerate(compiled(fast), concurrent=OWN)) == seen(compiled(plain))
    assert fast.most_at_once >= 3
    assert fast.calls == plain.calls


def test_single_prompt_is_sent_unchanged() -> None:
    ledger = Ledger()
    chain = ChatPromptTemplate.from_template("{x}") | Text(ledger=ledger)
    fast = accelerate(chain, concurrent=OWN)
    assert fast.invoke({"x": 1}) == chain.invoke({"x": 1})
    assert ledger.calls == {"text: Human: 1": 2}


def test_calls_of_a_model_without_run_manager_overlap() -> None:
    class Untold(Counted):
        def _generate(self, messages: Any, stop: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            return super()._generate(messages, stop, None, **kwargs)

    ledger = Ledger(meet=3)
    chain = LLMChain(llm=Untold(ledger=ledger), prompt=PromptTemplate.from_template("Of {x}"))
    with side_by_side(Untold):
        chain.apply([{"x": i} for i in range(3)])
    assert (ledger.most_at_once, ledger.calls.total()) == (3, 3)
