"""Tests of LangGraph's functional API: certain calls of own models are prefetched, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, TypedDict

import pytest
from langchain_openai import ChatOpenAI
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, interrupt
from support.hosted_model import LATENCY_S, HostedModel
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate

Build = Callable[[Any], Any]
WAYS = ("invoke", "ainvoke", "updates", "messages", "events")


def tasks_in_sequence(model: Any) -> Any:
    @task
    def write_joke(topic: str) -> str:
        return str(model.invoke(f"joke about {topic}").content)

    @task
    def write_story(topic: str) -> str:
        return str(model.invoke(f"story about {topic}").content)

    @task
    def combine(topic: str, joke: str, story: str) -> str:
        combined = f"On {topic}:\n"
        combined += f"{joke}\n{story}"
        return combined

    @entrypoint()
    def flow(topic: str) -> str:
        joke = write_joke(topic).result()
        story = write_story(topic).result()
        return combine(topic, joke, story).result()

    return flow


def awaited_tasks(model: Any) -> Any:
    @task
    async def ask(kind: str, topic: str) -> str:
        return str((await model.ainvoke(f"{kind} about {topic}")).content)

    @entrypoint()
    async def flow(topic: str) -> list[str]:
        joke = await ask("joke", topic)
        story = await ask("story", topic)
        return [joke, story]

    return flow


def loop_over_items(model: Any) -> Any:
    @task
    def note(item: str) -> str:
        return str(model.invoke(f"note {item}").content)

    @entrypoint()
    def flow(topic: str) -> list[str]:
        notes = []
        for item in topic.split("a"):
            notes.append(note(item).result())
        return notes

    return flow


def models_without_tasks(model: Any) -> Any:
    @entrypoint()
    def flow(topic: str) -> str:
        first = model.invoke(f"first {topic}").content
        second = model.invoke(f"second {topic}").content
        return f"{first} {second}"

    return flow


def decided_by_the_input(model: Any) -> Any:
    @task
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} about {topic}").content)

    @entrypoint()
    def flow(topic: str) -> list[str]:
        answers = [ask("joke", topic).result()]
        if topic.startswith("c"):
            answers.append(ask("story", topic).result())
        return answers

    return flow


def tasks_in_a_node(model: Any) -> Any:
    class State(TypedDict, total=False):
        topic: str
        notes: list[str]

    @task
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} about {topic}").content)

    def take_notes(state: State) -> State:
        return {"notes": [ask("joke", state["topic"]).result(), ask("story", state["topic"]).result()]}

    graph = StateGraph(State)
    graph.add_node("take_notes", take_notes)
    graph.add_edge(START, "take_notes")
    return graph.compile()


def reviewed_sections(model: Any) -> Any:
    """Return a workflow with futures in lists. A task waits only for the section that it needs."""

    @task
    def plan(topic: str) -> list[str]:
        return str(model.invoke(f"plan {topic}").content).split()

    @task
    def write(section: str) -> str:
        return str(model.invoke(f"write {section}").content)

    @task
    def review(text: str) -> str:
        return str(model.invoke(f"review {text}").content)

    @entrypoint()
    def flow(topic: str) -> list[str]:
        sections = plan(topic).result()
        texts = [future.result() for future in [write(section) for section in sections]]
        reviews = []
        for text in texts:
            reviews.append(review(text))
        results = []
        for one in reviews:
            results.append(one.result())
        return results

    return flow


GAINING = (
    tasks_in_sequence,
    awaited_tasks,
    loop_over_items,
    models_without_tasks,
    decided_by_the_input,
    tasks_in_a_node,
)
LOSES_RESULTS = version("langgraph") == "1.2.0"
"""True for a LangGraph whose own `astream_events` loses the result of a task in `reviewed_sections`."""


def runs(build: Build, way: str) -> bool:
    """Return True if the original runs in this way."""
    if build is awaited_tasks:
        return way != "invoke"
    return not (LOSES_RESULTS and build is reviewed_sections and way == "events")


CASES = [
    pytest.param(build, way, id=f"{build.__name__}-{way}")
    for build in (*GAINING, reviewed_sections)
    for way in WAYS
    if runs(build, way)
]


def called(graph: Any, way: str, given: Any = "cats") -> Any:
    """Return what a graph gives in one way of calling, without ids of runs."""
    given = {"topic": given} if "topic" in graph.channels else given
    if way == "invoke":
        return graph.invoke(given)
    if way == "ainvoke":
        return asyncio.run(graph.ainvoke(given))

    async def read() -> list[Any]:
        if way == "updates":
            return [piece async for piece in graph.astream(given, stream_mode="updates")]
        if way == "messages":
            pieces = graph.astream(given, stream_mode="messages")
            return [(type(message).__name__, message.content) async for message, _ in pieces]
        events = graph.astream_events(given, version="v2")
        return [(event["event"], event["name"]) async for event in events]

    return asyncio.run(read())


@pytest.mark.parametrize(("build", "way"), CASES)
def test_calls_of_tasks_equal_the_originals_and_overlap(build: Build, way: str) -> None:
    plain, fast = HostedModel(latency_s=0.01), HostedModel(latency_s=3 * LATENCY_S)
    expected = called(build(plain), way)

    result = called(accelerate(build(fast)), way)

    in_order = sorted if way == "events" or build is reviewed_sections else list  # tasks run on threads
    assert in_order(map(str, result)) == in_order(map(str, expected))
    assert fast.prompts == plain.prompts
    assert build not in GAINING or plain.most_at_once < fast.most_at_once


def test_call_that_the_input_rules_out_is_not_made() -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(decided_by_the_input(plain), "invoke", "dogs")

    result = called(accelerate(decided_by_the_input(fast)), "invoke", "dogs")

    assert result == expected
    assert fast.prompts == plain.prompts


def test_speculate_off_prefetches_nothing_in_tasks() -> None:
    model = HostedModel()

    called(accelerate(tasks_in_sequence(model), speculate="off"), "invoke")

    assert model.most_at_once == 1


def test_report_names_the_calls_of_tasks() -> None:
    explained = accelerate(tasks_in_sequence(HostedModel())).explain()

    assert "flow.model2: when its node begins" in explained


# ------------------------------------------------------------ requests that a server gets


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub() as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [tasks_in_sequence, loop_over_items, reviewed_sections])
def test_server_gets_the_requests_of_the_original(stub: OpenAIStub, build: Build, way: str) -> None:
    if not runs(build, way):
        pytest.skip("the original does not run in this way")
    model = ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0)  # type: ignore[arg-type]
    stub.requests.clear()
    called(build(model), way)
    expected = sorted(map(str, stub.generations))
    stub.requests.clear()

    called(accelerate(build(model)), way)

    assert sorted(map(str, stub.generations)) == expected


# ------------------------------------------------------------ where nothing may be prefetched


def with_a_cached_task(model: Any) -> Any:
    @task(cache_policy=CachePolicy())
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} about {topic}").content)

    @entrypoint(cache=InMemoryCache())
    def flow(topic: str) -> list[str]:
        return [ask("joke", topic).result(), ask("story", topic).result()]

    return flow


def with_a_cache_for_all_tasks(model: Any) -> Any:
    @task
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} about {topic}").content)

    @entrypoint(cache=InMemoryCache(), cache_policy=CachePolicy())
    def flow(topic: str) -> list[str]:
        return [ask("joke", topic).result(), ask("story", topic).result()]

    return flow


def behind_code_that_may_write(model: Any) -> Any:
    files: dict[str, str] = {}

    @task
    def save(text: str) -> None:
        files.__setitem__("last", text)

    @task
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} about {topic} {files.get('last')}").content)

    @entrypoint()
    def flow(topic: str) -> list[str]:
        joke = ask("joke", topic).result()
        save(joke).result()
        return [joke, ask("story", topic).result()]

    return flow


@pytest.mark.parametrize("build", [with_a_cached_task, with_a_cache_for_all_tasks, behind_code_that_may_write])
def test_uncertain_call_of_a_task_is_not_prefetched(build: Build) -> None:
    plain, fast = HostedModel(), HostedModel()
    original, accelerated = build(plain), accelerate(build(fast))
    expected = [called(original, "invoke") for _ in range(2)]

    results = [called(accelerated, "invoke") for _ in range(2)]

    assert results == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 1


def with_an_interrupt(model: Any, saver: Any) -> Any:
    @task
    def ask(kind: str, topic: str) -> str:
        return str(model.invoke(f"{kind} about {topic}").content)

    @entrypoint(checkpointer=saver)
    def flow(topic: str) -> list[str]:
        drafts = [ask("joke", topic).result(), ask("story", topic).result()]
        review = interrupt({"drafts": drafts})
        return [*drafts, ask(review, topic).result()]

    return flow


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_task_that_ended_before_an_interrupt_is_called_once(way: str) -> None:
    results = []
    for make in (lambda graph: graph, accelerate):
        model = HostedModel()
        graph = make(with_an_interrupt(model, InMemorySaver()))
        config = {"configurable": {"thread_id": "1"}}
        for given in ("cats", Command(resume="review")):
            result = graph.invoke(given, config) if way == "invoke" else asyncio.run(graph.ainvoke(given, config))
        results.append((result, model.prompts))

    assert results[0] == results[1]
    assert len(results[0][1]) == 3


# ------------------------------------------------------------ failures


def test_task_that_ended_before_an_error_is_called_once() -> None:
    counts = []
    for make in (lambda graph: graph, accelerate):
        model = HostedModel(fails_on="story", failures=1)

        @task
        def ask(kind: str, topic: str, model: Any = model) -> str:
            return str(model.invoke(f"{kind} about {topic}").content)

        @entrypoint(checkpointer=InMemorySaver())
        def flow(topic: str, ask: Any = ask) -> list[str]:
            joke = ask("joke", topic).result()
            story = ask("story", joke).result()
            return [joke, story, ask("poem", story[:6]).result()]

        graph, config = make(flow), {"configurable": {"thread_id": "1"}}
        with pytest.raises(ValueError, match="refused: story"):
            graph.invoke("cats", config)
        result = graph.invoke(None, config)
        counts.append((result, Counter(model.prompts)))

    assert counts[0] == counts[1]


@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_task_is_the_originals(way: str) -> None:
    plain, fast = HostedModel(fails_on="joke"), HostedModel(fails_on="joke")
    for graph in (tasks_in_sequence(plain), accelerate(tasks_in_sequence(fast))):
        with pytest.raises(ValueError, match="refused: joke about cats"):
            called(graph, way)

    assert plain.prompts == ["joke about cats"]
    assert fast.prompts in (plain.prompts, ["joke about cats", "story about cats"])


def test_retried_task_makes_its_own_second_call() -> None:
    def build(model: Any) -> Any:
        @task(retry_policy=RetryPolicy(initial_interval=0.001, jitter=False, retry_on=ValueError))
        def ask(kind: str, topic: str) -> str:
            return str(model.invoke(f"{kind} about {topic}").content)

        @entrypoint()
        def flow(topic: str) -> list[str]:
            return [ask("joke", topic).result(), ask("story", topic).result()]

        return flow

    plain, fast = HostedModel(fails_on="story", failures=1), HostedModel(fails_on="story", failures=1)
    expected = called(build(plain), "invoke")

    assert called(accelerate(build(fast)), "invoke") == expected
    assert fast.prompts == plain.prompts


def test_cancelled_call_leaves_no_call_running() -> None:
    model = HostedModel()
    graph = accelerate(awaited_tasks(model))

    async def cancel() -> None:
        call = asyncio.create_task(graph.ainvoke("cats"))
        await asyncio.sleep(LATENCY_S / 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.02)

    asyncio.run(cancel())
    assert model._running == 0
    assert model.most_at_once == 2
