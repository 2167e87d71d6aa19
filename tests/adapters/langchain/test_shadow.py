"""Tests of `accelerate(..., shadow=)`, which runs the original again in the background and compares the results.

Also tests of what runs when planning fails.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import threading
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import pytest
from differential.recording import Recorder
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from support.own_leaves import Chat, Ledger
from support.small_chains import QUESTION, WAYS, ask, call, two_steps, wait_for_report

from teola_plugin import EnginePool, QueryTimeout, RegistrationError, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.shadow import Shadow, ShadowReport, difference, snapshot
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore

# ------------------------------------------------------------ comparing


@pytest.mark.parametrize("way", WAYS)
def test_shadow_counts_equal_answers_without_warning(
    fakes: EnginePool, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    fast = accelerate(two_steps(ChatTeola(pool=fakes, max_tokens=8)), shadow=1.0)
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        value, report = call(fast, way)
    assert value["a"] and value["b"]
    assert report == ShadowReport(compared=1)
    assert not caplog.records


@pytest.mark.parametrize("way", WAYS)
def test_shadow_ignores_message_ids(fakes: EnginePool, way: str) -> None:
    fast = accelerate(ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=fakes), shadow=1.0)
    value, report = call(fast, way)
    assert isinstance(value, AIMessage) and value.id
    assert (report.compared, report.different) == (1, 0)


@pytest.mark.parametrize("way", WAYS)
def test_shadow_logs_and_counts_a_difference(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The framework's fake answers by the order of its calls."""
    model = FakeListChatModel(responses=["oats", "hay"])
    fast = accelerate(ask("{question}", model), shadow=1.0)
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        value, report = call(fast, way)
    assert value == "oats"
    assert (report.compared, report.different, report.failed) == (1, 1, 0)
    assert report.last_difference == "'oats' here, 'hay' there"
    assert "'oats' here, 'hay' there" in caplog.text


def test_shadow_difference_names_the_key() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("one"), AIMessage("two"), AIMessage("two")]))
    fast = accelerate({"said": ask("{question}", model)} | RunnablePassthrough(), shadow=1.0)
    _, report = call(fast, "invoke")
    assert report.last_difference == "['said']: 'one' here, 'two' there"


@pytest.mark.parametrize("way", WAYS)
def test_failure_of_the_shadow_run_is_counted_and_not_raised(way: str) -> None:
    calls: list[int] = []

    def once(_: Any) -> str:
        calls.append(1)
        if len(calls) > 1:
            raise SystemExit("only once") if way == "invoke" else OSError("only once")
        return "fine"

    value, report = call(accelerate(RunnableLambda(once), shadow=1.0), way)
    assert value == "fine"
    assert report == ShadowReport(failed=1)


@pytest.mark.parametrize("way", WAYS)
def test_shadow_counts_equal_failures_as_equal(way: str) -> None:
    def fail(_: Any) -> Any:
        raise LookupError("lost")

    fast = accelerate(RunnableLambda(fail), shadow=1.0)
    with pytest.raises(LookupError, match="lost"):
        call(fast, way)
    if way == "invoke":  # the loop ends with the error
        assert wait_for_report(fast, 1) == ShadowReport(compared=1)


def test_shadow_counts_failure_missing_in_the_original_as_difference() -> None:
    calls: list[int] = []

    def at_first(_: Any) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("lost")
        return "found"

    fast = accelerate(RunnableLambda(at_first), shadow=1.0)
    with pytest.raises(LookupError):
        fast.invoke(1)
    report = wait_for_report(fast, 1)
    assert report.different == 1 and "LookupError" in report.last_difference and "found" in report.last_difference


def test_shadow_ignores_later_changes_by_the_caller() -> None:
    gate = threading.Event()
    calls: list[int] = []

    def waits(given: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 1:
            gate.wait(10)
        return {"items": list(given["items"])}

    fast, given = accelerate(RunnableLambda(waits), shadow=1.0), {"items": [1, 2]}
    value = fast.invoke(given)
    value["items"].append("mine")
    given["items"].clear()
    gate.set()
    assert wait_for_report(fast, 1) == ShadowReport(compared=1)


# ------------------------------------------------------------ unseen


@pytest.mark.parametrize("way", WAYS)
def test_shadow_run_sends_no_callbacks_or_usage(fakes: EnginePool, way: str) -> None:
    chain = two_steps(ChatTeola(pool=fakes, max_tokens=8))
    recorders, usages = [], []
    for one in (accelerate(chain), accelerate(chain, shadow=1.0)):
        recorders.append(Recorder())
        with get_usage_metadata_callback() as usage:
            call(one, way, expected=1 if one._shadow else 0, callbacks=[recorders[-1]])
            usages.append(usage.usage_metadata)
    assert recorders[0].events == recorders[1].events and recorders[0].events
    assert [u["output_tokens"] for u in usages[0].values()] == [u["output_tokens"] for u in usages[1].values()] != []


@pytest.mark.parametrize("way", WAYS)
def test_nested_shadow_run_sends_no_callbacks(way: str) -> None:
    """There the config is ambient: the outer lambda does not hand it on."""
    fast = accelerate(ask("{question}", Chat(says="m")), shadow=1.0)
    recorder = Recorder()
    if way == "invoke":
        RunnableLambda(lambda x: fast.invoke(x)).invoke(QUESTION, {"callbacks": [recorder]})
    else:

        async def outer(given: Any) -> Any:
            value = await fast.ainvoke(given)
            await asyncio.to_thread(wait_for_report, fast, 1)
            return value

        asyncio.run(RunnableLambda(outer).ainvoke(QUESTION, {"callbacks": [recorder]}))
    assert wait_for_report(fast, 1).compared == 1
    assert sum(n for (event, *_), n in recorder.events.items() if event == "chat_model_start") == 1


@pytest.mark.parametrize("way", WAYS)
def test_shadow_run_has_context_and_config_of_the_caller(way: str) -> None:
    variable: ContextVar[str] = ContextVar("mine", default="lost")
    seen: list[Any] = []

    def look(given: Any, config: Any) -> str:
        seen.append((variable.get(), config["tags"], config["configurable"]["user"], config["metadata"]["k"]))
        return "x"

    variable.set("kept")
    fast = accelerate(RunnableLambda(look), shadow=1.0)
    call(fast, way, tags=["t"], configurable={"user": 7}, metadata={"k": 1})
    assert len(seen) == 2 and seen[0] == seen[1] == ("kept", ["t"], 7, 1)


def test_caller_does_not_wait_for_at_most_four_shadow_runs() -> None:
    gate, fast_thread = threading.Event(), threading.current_thread()

    def waits(given: int) -> int:
        if threading.current_thread() is not fast_thread:
            gate.wait(10)
        return given

    fast = accelerate(RunnableLambda(waits), shadow=1.0)
    assert [fast.invoke(i) for i in range(10)] == list(range(10))  # would hang if the original were waited for
    assert fast.shadow == ShadowReport(skipped=6)
    gate.set()
    assert wait_for_report(fast, 10) == ShadowReport(compared=4, skipped=6)


async def test_async_shadow_runs_are_bounded_and_cancelled_ones_are_skipped() -> None:
    gate, begun = asyncio.Event(), set[int]()

    async def waits(given: int) -> int:
        if given in begun:
            await gate.wait()
        begun.add(given)
        return given

    fast = accelerate(RunnableLambda(waits), shadow=1.0)
    for i in range(6):
        assert await fast.ainvoke(i) == i
    assert fast.shadow == ShadowReport(skipped=2)
    next(iter(fast._shadow._tasks)).cancel()
    gate.set()
    while fast._shadow._tasks:
        await asyncio.sleep(0.001)
    assert fast.shadow == ShadowReport(compared=3, skipped=3)


def test_shadow_run_is_skipped_if_the_loop_ends_first() -> None:
    async def sleeps(given: int) -> int:
        if given in begun:
            await asyncio.sleep(60)
        begun.append(given)
        return given

    begun: list[int] = []
    fast = accelerate(RunnableLambda(sleeps), shadow=1.0)
    assert asyncio.run(fast.ainvoke(1)) == 1
    assert fast.shadow == ShadowReport(skipped=1)


def test_shadow_does_not_compare_query_timeouts() -> None:
    def late(_: Any) -> Any:
        raise QueryTimeout("too late.")

    fast = accelerate(RunnableLambda(late), shadow=1.0)
    with pytest.raises(QueryTimeout):
        fast.invoke(1)
    assert fast.shadow == ShadowReport()


# ------------------------------------------------------------ choosing


def test_shadow_is_off_by_default() -> None:
    ledger = Ledger()
    fast = accelerate(ask("{question}", Chat(ledger=ledger)))
    fast.invoke(QUESTION)
    assert fast.shadow == ShadowReport() and ledger.calls.total() == 1


def test_shadow_choice_keeps_its_share_and_is_deterministic() -> None:
    chosen = [[shadow.choose() for _ in range(2000)] for shadow in (Shadow(0.1), Shadow(0.1), Shadow(0.1, seed=1))]
    assert chosen[0] == chosen[1] != chosen[2]
    assert 150 < sum(chosen[0]) < 250
    assert not any(Shadow(0.0).choose() for _ in range(100))


def test_only_chosen_calls_run_in_the_shadow() -> None:
    ledger, twin = Ledger(), Shadow(0.3)
    fast = accelerate(ask("{question}", Chat(ledger=ledger)), shadow=0.3)
    chosen = 0
    for i in range(30):
        fast.invoke({"question": str(i)})
        chosen += twin.choose()
        wait_for_report(fast, chosen)
    assert 0 < chosen < 30
    assert fast.shadow == ShadowReport(compared=chosen) and ledger.calls.total() == 30 + chosen


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_shadow_share_outside_zero_to_one_raises(share: float) -> None:
    with pytest.raises(RegistrationError, match="no share"):
        accelerate(RunnableLambda(str), shadow=share)


def test_shadow_raises_for_chains_that_write(fakes: EnginePool) -> None:
    store = TeolaVectorStore(pool=fakes, embedding=TeolaEmbeddings(pool=fakes), collection="uploads")
    with pytest.raises(RegistrationError, match=r"index to .*uploads"):
        accelerate(itemgetter("documents") | TeolaIndexer(store=store), shadow=0.1)
    history = RunnableWithMessageHistory(
        RunnableLambda(lambda messages: AIMessage("x")), lambda session_id: InMemoryChatMessageHistory()
    )
    with pytest.raises(RegistrationError, match="message history"):
        accelerate(history.with_config(tags=["t"]) | StrOutputParser(), shadow=0.1)


def test_copy_of_a_shadow_starts_with_an_empty_report() -> None:
    shadow = Shadow(1.0, seed=3, in_flight=1)
    shadow._count(compared=1)
    for again in (copy.deepcopy(shadow), pickle.loads(pickle.dumps(shadow))):
        assert again.report == ShadowReport() and again.share == 1.0


# ------------------------------------------------------------ what is the same


class Opaque:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (AIMessage("a", id="1"), AIMessage("a", id="2"), True),
        (AIMessage("a"), "a", False),
        (AIMessage("a", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "1"}]), AIMessage("a"), False),
        ([0.1, 0.2], [0.1 + 1e-7, 0.2], True),
        ([0.1, 0.2], [0.2, 0.1], False),
        ([1], (1,), False),
        (1, 1.0, False),
        ({1, 2}, {2, 1}, True),
        ({"a": [Document(page_content="x")]}, {"a": [Document(page_content="x")]}, True),
        ({"a": [Document(page_content="x")]}, {"a": [Document(page_content="y")]}, False),
        (Opaque([1]), Opaque([1]), True),
        (Opaque(1), Opaque(2), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (float("nan"), float("nan"), True),
    ],
)
def test_shadow_difference_compares_values(first: Any, second: Any, same: bool) -> None:
    assert (difference(snapshot(first), snapshot(second)) == "") is same


def test_shadow_compares_self_referencing_values() -> None:
    loop: list[Any] = []
    loop.append(loop)
    thing = Opaque(None)
    thing.inside = [thing, thing, {"more": thing}]
    assert difference(snapshot(loop), snapshot(loop)) == difference(snapshot(thing), snapshot(thing)) == ""
