"""Tests of tools that start while their call is still being written: which start early, are claimed, or never start."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import InjectedToolCallId, ToolException, create_retriever_tool, tool
from support.agents import INPUT, KINDS, World, agent, run, summarize_messages, world
from support.writing_llm import call

from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.langchain import TeolaEmbeddings, TeolaVectorStore, read_only

WAYS = ["invoke", "ainvoke"]


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


def weather_of(at: World, *, coroutine: bool = False, raises: BaseException | None = None) -> Any:
    """Return a read-only tool that records its runs."""

    def weather(city: str, days: int = 1) -> str:
        """The weather of a city."""
        at.ran.append((city, days))
        if raises is not None:
            raise raises
        return f"sunny in {city} for {days}"

    async def later(city: str, days: int = 1) -> str:
        """The weather of a city."""
        await asyncio.sleep(0)
        return weather(city, days)

    made: Any = tool("weather")(weather)
    return read_only(made.model_copy(update={"coroutine": later}) if coroutine else made)


def outcomes(graph: Any) -> list[str]:
    """Return the outcomes of the tools that ran early in the last call."""
    return [step.outcome for step in graph.last_trace().steps if step.kind == "tool" and step.is_prefetched]


# ---------------------------------------------------------------- read-only tools


def test_read_only_marks_a_copy_of_the_tool() -> None:
    @tool
    def plain(x: int) -> int:
        """x"""
        return x

    plain.metadata = {"mine": 1}
    made = read_only(plain)
    assert made is not plain and plain.metadata == {"mine": 1} and made.invoke({"x": 3}) == 3
    assert made.metadata == {"mine": 1, "teola_read_only": True}
    with pytest.raises(RegistrationError, match="above @tool"):
        read_only(lambda x: x)  # type: ignore[type-var]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coroutine", [False, True])
def test_read_only_tool_is_prefetched_while_the_answer_streams(at: World, kind: str, way: str, coroutine: bool) -> None:
    plain = KINDS[kind](at.model, [weather_of(at, coroutine=coroutine)])
    at.writes("I look. ", call("weather", city="Rome"), at.has_run(), " So.")
    fast = at.fast(plain)
    made = run(fast, way)
    assert at.llm.fulfilled_waits == [True] and at.ran == [("Rome", 1)]
    assert outcomes(fast) == ["claimed"]
    at.writes("I look. ", call("weather", city="Rome"), " So.")
    assert summarize_messages(made) == summarize_messages(run(plain, way)) and at.ran == [("Rome", 1)] * 2
    ids = [one["id"] for one in made[1].tool_calls]
    assert [message.tool_call_id for message in made[2:-1]] == ids


@pytest.mark.parametrize("way", WAYS)
def test_parallel_tool_calls_overlap_and_equal_ones_run_twice(at: World, way: str) -> None:
    """The original makes the second of two equal calls itself. Other tools run while the answer is being written."""
    plain = agent(at.model, [weather_of(at)])
    calls = [call("weather", city="Rome"), call("weather", city="Oslo", days=2), call("weather", city="Rome")]
    at.writes(*calls, at.has_run(2))
    fast = at.fast(plain)
    made = run(fast, way)
    assert at.llm.fulfilled_waits == [True] and sorted(at.ran) == [("Oslo", 2), ("Rome", 1), ("Rome", 1)]
    at.writes(*calls)
    assert summarize_messages(made) == summarize_messages(run(plain, way)) and outcomes(fast) == ["claimed", "claimed"]


@pytest.mark.parametrize("way", WAYS)
def test_prefetched_tool_may_call_an_accelerated_chain(at: World, way: str) -> None:
    """The chain takes requests that were prefetched when the tool's call was written, and makes none twice."""
    prompts: list[str] = []

    def writes(prompt: Any) -> list[Any]:
        text = prompt.messages[-1].content
        prompts.append(text)
        if prompt.messages[-1].role == "tool":
            return ["done"]
        return ["summed"] if text.startswith("Sum up") else ["I look. ", call("sums", city="Rome"), " So."]

    plain = ChatPromptTemplate.from_template("Sum up {city}") | at.model | StrOutputParser()

    def summing(chain: Any) -> Any:
        @tool
        def sums(city: str) -> str:
            """What there is to say of a city."""
            return str(chain.invoke({"city": city}))

        return sums

    at.llm.writes = writes
    seen = []
    for graph in (agent(at.model, [summing(plain)]), at.fast(agent(at.model, [summing(at.fast(plain))]))):
        prompts.clear()
        seen.append((summarize_messages(run(graph, way)), sorted(prompts)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("coroutine", [False, True])
def test_error_of_a_prefetched_tool_is_raised_when_claimed(at: World, way: str, coroutine: bool) -> None:
    broken = agent(at.model, [weather_of(at, coroutine=coroutine, raises=ZeroDivisionError("no weather"))])
    at.writes(call("weather", city="Rome"), at.has_run())
    with pytest.raises(ZeroDivisionError, match="no weather"):
        run(at.fast(broken), way)
    assert at.llm.fulfilled_waits == [True] and at.ran == [("Rome", 1)]
    at.ran.clear()
    handled_tool = weather_of(at, coroutine=coroutine, raises=ToolException("ask later")).model_copy(
        update={"handle_tool_error": True}
    )
    assert summarize_messages(run(at.fast(agent(at.model, [handled_tool])), way))[2][1:4] == (
        "ask later",
        "weather",
        "error",
    )
    assert at.ran == [("Rome", 1)]


def test_tool_calls_in_json_lists_and_bare_objects_are_prefetched(at: World) -> None:
    fast = at.fast(agent(at.model, [weather_of(at)]))
    one = '{"name": "weather", "arguments": {"city": "Rome"}}'
    for text, rest in (("[" + one, "]"), (one, "\n"), (one[:-1], "}")):
        at.ran.clear()
        at.writes(text, at.has_run(), rest) if text[-1:] != "]" and rest != "}" else at.writes(text, rest)
        assert [message.content for message in run(fast, "invoke")][2] == "sunny in Rome for 1"
        assert at.ran == [("Rome", 1)]
    assert at.llm.fulfilled_waits == [True, True]


@pytest.mark.parametrize(
    "pieces",
    [
        [call("weather", city="Rome")[: -len("</tool_call>")], " and more, so it is no JSON"],
        ['{"name": "weather", "arguments": {"city": "Rome"}}', " is what I would say"],
    ],
)
def test_wrongly_predicted_tool_call_is_wasted_and_not_in_messages(at: World, pieces: list[str]) -> None:
    plain = agent(at.model, [weather_of(at)])
    at.writes(pieces[0], at.has_run(), pieces[1])
    fast = at.fast(plain)
    made = run(fast, "invoke")
    assert at.llm.fulfilled_waits == [True] and summarize_messages(made) == summarize_messages(run(plain, "invoke"))
    assert len(made) == 2 and outcomes(fast) == ["wasted"] and at.ran == [("Rome", 1)]


@pytest.mark.parametrize(
    "text", [call("weather", town="Rome"), call("weather", city="Rome", days="soon"), call("climate", city="Rome")]
)
def test_tool_call_with_invalid_arguments_is_not_prefetched(at: World, text: str) -> None:
    plain = agent(at.model, [weather_of(at)])
    at.writes(text)
    fast = at.fast(plain)
    assert (
        summarize_messages(run(fast, "invoke")) == summarize_messages(run(plain, "invoke"))
        and at.ran == []
        and outcomes(fast) == []
    )


def test_prefetched_tool_gets_arguments_converted_by_its_schema(at: World) -> None:
    at.writes(call("weather", city="Rome", days="3"), at.has_run())
    run(at.fast(agent(at.model, [weather_of(at)])), "invoke")
    assert at.ran == [("Rome", 3)] and at.llm.fulfilled_waits == [True]


def test_read_only_tool_after_a_writing_tool_is_not_prefetched(at: World) -> None:
    """A tool that reads after one that may write is called in its place, as is what stands before it."""

    @tool
    def note(text: str) -> str:
        """Notes."""
        at.ran.append(text)
        return "noted"

    reads = weather_of(at)
    fast = at.fast(agent(at.model, [note, reads]))
    at.writes(call("note", text="a"), call("weather", city="Rome"), lambda: True)
    run(fast, "invoke")
    assert outcomes(fast) == [] and sorted(map(str, at.ran)) == ["('Rome', 1)", "a"]
    at.ran.clear()
    at.writes(call("weather", city="Rome"), at.has_run(), call("note", text="a"))
    run(fast, "invoke")
    assert outcomes(fast) == ["claimed"] and at.ran == [("Rome", 1), "a"]


def test_coroutine_tool_without_a_loop_is_not_prefetched(at: World) -> None:
    @tool
    async def only(city: str) -> str:
        """Only on a loop."""
        at.ran.append(city)
        return city

    at.writes(call("only", city="Rome"))
    graph = agent(at.model, [read_only(only)])
    for one in (graph, at.fast(graph)):
        with pytest.raises(NotImplementedError):
            one.invoke(INPUT)
    assert at.ran == []
    at.writes(call("only", city="Rome"), at.has_run())
    assert (
        run(at.fast(graph), "ainvoke")[2].content == "Rome" and at.llm.fulfilled_waits == [True] and at.ran == ["Rome"]
    )


def test_failed_answer_cancels_its_prefetched_tools(at: World) -> None:
    gone: list[str] = []

    @read_only
    @tool
    async def endless(city: str) -> str:
        """Never ends by itself."""
        at.ran.append(city)
        try:
            await asyncio.sleep(60)
        finally:
            gone.append(city)
        return city

    def breaks() -> bool:
        if at.ran:
            raise RuntimeError("the engine broke")
        return False

    fast = at.fast(agent(at.model, [endless]))
    at.writes(call("endless", city="Rome"), breaks)

    async def run_agent() -> None:
        with pytest.raises(EngineError):
            await fast.ainvoke(INPUT)
        await asyncio.sleep(0.05)

    asyncio.run(run_agent())
    assert at.ran == gone == ["Rome"] and outcomes(fast) == ["wasted"]


def test_cancelled_agent_call_cancels_its_prefetched_tool(at: World) -> None:
    gone: list[str] = []

    @read_only
    @tool
    async def endless(city: str) -> str:
        """Never ends by itself."""
        at.ran.append(city)
        try:
            await asyncio.sleep(60)
        finally:
            gone.append(city)
        return city

    fast = at.fast(agent(at.model, [endless]))
    at.writes(call("endless", city="Rome"), at.has_run())

    async def run_agent() -> None:
        task = asyncio.create_task(fast.ainvoke(INPUT))
        while not at.llm.fulfilled_waits:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # the plain call waits for it by now
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run_agent())
    assert at.ran == gone == ["Rome"]


def test_trace_has_a_step_for_each_tool_call(at: World) -> None:
    at.writes(call("weather", city="Rome"), at.has_run())
    fast = at.fast(agent(at.model, [weather_of(at)]))
    run(fast, "invoke")
    steps = {step.id: step for step in fast.last_trace().steps}
    early, plain = (step for step in steps.values() if step.kind == "tool")
    assert (early.name, early.is_prefetched, early.outcome) == ("weather", True, "claimed")
    assert (plain.name, plain.is_prefetched, plain.outcome) == ("weather", False, "done")
    assert (steps[early.parent].name, steps[plain.parent].name) == ("model", "tools")
    assert early.ended is not None and early.ended <= plain.began


# ---------------------------------------------------------------- what its place alone can give


def test_tool_writing_to_the_stream_is_wasted_and_run_again(at: World) -> None:
    """Nobody sees what an early tool would have written, even from code deep inside."""

    def tell(text: str) -> None:  # as a library may, where nobody sees it before
        vars(importlib.import_module("langgraph." + "config"))["get_" + "stream_writer"]()(text)

    @read_only
    @tool
    def telling(city: str) -> str:
        """Tells of itself."""
        at.ran.append(city)
        tell(f"looking at {city}")
        return city

    plain = agent(at.model, [telling])
    at.writes(call("telling", city="Rome"), at.has_run())
    fast = at.fast(plain)
    made = list(fast.stream(INPUT, stream_mode="custom"))
    assert at.llm.fulfilled_waits == [True] and made == ["looking at Rome"] and outcomes(fast) == ["wasted"]
    at.ran.clear()
    at.writes(call("telling", city="Rome"))
    assert list(fast.stream(INPUT, stream_mode="custom")) == list(plain.stream(INPUT, stream_mode="custom")) == made
    assert at.ran == ["Rome"] * 2 and outcomes(fast) == [], "it is not tried again"


def test_tool_that_changes_its_arguments_is_no_longer_prefetched(at: World) -> None:
    @read_only
    @tool
    def eats(names: list[str]) -> str:
        """Eats a list."""
        at.ran.append(list(names))
        return str([names.pop() for _ in range(len(names))])

    at.writes(call("eats", names=["a", "b"]), at.has_run())
    fast = at.fast(agent(at.model, [eats]))
    assert run(fast, "invoke")[2].content == "['b', 'a']"
    run(fast, "invoke")
    assert outcomes(fast) == [] and at.ran == [["a", "b"]] * 3, "the first time twice, then once"


def test_max_concurrency_disables_tool_prefetch(at: World) -> None:
    at.writes(call("weather", city="Rome"))
    fast = at.fast(agent(at.model, [weather_of(at)]))
    fast.invoke(INPUT, {"max_concurrency": 2})
    assert outcomes(fast) == [] and at.ran == [("Rome", 1)]


def test_at_most_sixteen_tools_are_prefetched_at_once(at: World) -> None:
    ends = threading.Event()
    at_once: list[int] = []

    @read_only
    @tool
    def step(n: int) -> str:
        """A step."""
        at.ran.append(n)
        assert ends.wait(5)
        return str(n)

    def enough() -> bool:
        return len(at.ran) >= 16

    def over() -> bool:
        """From here on places are free, and the rest may begin early too."""
        at_once.append(len(at.ran))
        ends.set()
        return True

    at.writes(*(call("step", n=n) for n in range(20)), enough, over)
    fast = at.fast(agent(at.model, [step]))
    made = run(fast, "invoke")
    assert [message.content for message in made[2:-1]] == [str(n) for n in range(20)]
    assert at_once[0] == 16 and sorted(at.ran) == list(range(20))
    assert 16 <= len(outcomes(fast)) <= 20 and set(outcomes(fast)) == {"claimed"}


def test_agent_inside_a_tool_prefetches_its_own_tools(at: World) -> None:
    """The inner agent's calls do not count as the outer agent's, although their tools have the same name."""
    weather = weather_of(at)
    inner = agent(at.model, [weather])

    def build(inside: Any) -> Any:
        @tool
        def expert(question: str) -> str:
            """Asks an expert."""
            return str(inside.invoke({"messages": [("user", question)]})["messages"][-1].content)

        return agent(at.model, [expert, weather])

    def writes(prompt: Any) -> list[Any]:
        question = prompt.messages[-1].content
        if prompt.messages[-1].role == "tool":
            return ["done"]
        return (
            [call("weather", city="Rome"), at.has_run()]
            if question == "inside"
            else [call("expert", question="inside")]
        )

    at.llm.writes = writes
    for inside in (at.fast(inner), inner):
        at.ran.clear()
        at.llm.fulfilled_waits.clear()
        if inside is inner:
            at.llm.writes = lambda prompt: [one for one in writes(prompt) if isinstance(one, str)]
        fast = at.fast(build(inside))
        assert run(fast, "invoke")[2].content == "done" and at.ran == [("Rome", 1)]
        assert outcomes(fast) == (["claimed"] if inside is not inner else [])


# ---------------------------------------------------------------- tools on the pool


@pytest.fixture
def search(at: World) -> Any:
    store = TeolaVectorStore(pool=at.pool, embedding=TeolaEmbeddings(pool=at.pool))
    store.add_texts([f"sheep eat {what}" for what in ("grass", "hay", "oats")])
    return create_retriever_tool(store.as_retriever(search_kwargs={"k": 2}), "search", "Searches.")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_search_tool_is_prefetched_while_its_call_is_generated(at: World, search: Any, kind: str, way: str) -> None:
    plain = KINDS[kind](at.model, [search, weather_of(at)])
    batches_before = at.store.batches
    at.writes(call("search", query="sheep"), lambda: at.store.batches > batches_before, " So.")
    fast = at.fast(plain)
    made = run(fast, way)
    assert at.llm.fulfilled_waits == [True] and at.store.batches == batches_before + 1, "one search, and it is early"
    at.writes(call("search", query="sheep"), " So.")
    assert summarize_messages(made) == summarize_messages(run(plain, way)) and "sheep eat" in made[2].content
    kinds = [span.primitive for span in fast.last_trace().spans if span.kind == "SEARCHING"]
    assert kinds == ["part1/search.searching"]


def test_search_tool_after_a_write_finds_the_new_text(at: World, search: Any) -> None:
    store = TeolaVectorStore(pool=at.pool, embedding=TeolaEmbeddings(pool=at.pool))

    @tool
    def remember(text: str) -> str:
        """Remembers."""
        store.add_texts([text])
        return "yes"

    plain = agent(at.model, [search, remember])
    at.writes(call("remember", text="sheep eat sheep"), call("search", query="sheep eat sheep"))
    config: Any = {"max_concurrency": 1}
    made = at.fast(plain).invoke(INPUT, config)["messages"]
    assert "sheep eat sheep" in made[3].content


def test_unclaimed_search_is_wasted_or_cancelled(at: World, search: Any) -> None:
    at.writes('{"name": "search", "arguments": {"query": "sheep"}}', " I would say")
    fast = at.fast(agent(at.model, [search]))
    assert len(run(fast, "invoke")) == 2
    assert {span.outcome for span in fast.last_trace().spans if span.kind == "SEARCHING"} <= {"wasted", "cancelled"}


def test_search_inside_a_tool_function_is_prefetched_on_the_pool(at: World, search: Any) -> None:
    retriever = TeolaVectorStore(pool=at.pool, embedding=TeolaEmbeddings(pool=at.pool)).as_retriever()

    @tool
    def look(topic: str) -> str:
        """Looks."""
        at.ran.append(topic)
        return "; ".join(one.page_content for one in retriever.invoke(f"what do {topic} eat?"))

    batches_before = at.store.batches
    at.writes(call("look", topic="sheep"), lambda: at.store.batches > batches_before, lambda: not at.ran)
    plain = agent(at.model, [look])
    fast = at.fast(plain)
    made = run(fast, "invoke")
    assert at.llm.fulfilled_waits == [True, True] and at.store.batches == batches_before + 1 and at.ran == ["sheep"]
    at.writes(call("look", topic="sheep"))
    assert summarize_messages(made) == summarize_messages(run(plain, "invoke"))


# ---------------------------------------------------------------- whoever says that nothing runs ahead


@pytest.mark.parametrize("options", [{"speculate": "off"}, {"passes": ()}])
def test_options_without_prefetching_prefetch_no_tool(at: World, search: Any, options: dict[str, Any]) -> None:
    at.writes(call("weather", city="Rome"), call("search", query="sheep"))
    fast = at.fast(agent(at.model, [weather_of(at), search]), **options)
    assert len(run(fast, "invoke")) == 5 and outcomes(fast) == []
    assert all(span.primitive.startswith(("llm", "store", "embedder")) for span in fast.last_trace().spans)


def test_tool_with_injected_call_id_is_not_prefetched(at: World) -> None:
    @read_only
    @tool
    def marked(city: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> str:
        """Knows its call."""
        at.ran.append(city)
        return f"{city} {bool(tool_call_id)}"

    at.writes(call("marked", city="Rome"))
    fast = at.fast(agent(at.model, [marked]))
    assert run(fast, "invoke")[2].content == "Rome True" and outcomes(fast) == [] and at.ran == ["Rome"]
