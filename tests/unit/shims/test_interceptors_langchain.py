"""Tests of LangChain's provider methods: wrapped in the classes that define them, and restored exactly."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, FakeListLLM
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import BaseTool, StructuredTool, Tool, ToolException

from teola_plugin.shims import langchain_interceptors as seam
from teola_plugin.shims.interception import MethodInterceptors


class Model(BaseChatModel):
    temperature: float = 0.0
    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "model"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        self.calls += 1
        return ChatResult(generations=[ChatGeneration(message=AIMessage("answer"))])


class Streaming(Model):
    def _stream(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        for text in ("a", "b"):
            yield ChatGenerationChunk(message=AIMessageChunk(text))


class Scope:
    """Notes every invocation, and makes it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def items(self, invocation: Any) -> Iterator[Any]:
        self.seen.append(invocation)
        result = invocation.start(None)
        yield from result if invocation.streams else [result]

    async def aitems(self, invocation: Any) -> Any:
        self.seen.append(invocation)
        yield await invocation.start(None)

    def result(self, invocation: Any) -> Any:
        [result] = self.items(invocation)
        return result

    async def aresult(self, invocation: Any) -> Any:
        [result] = [item async for item in self.aitems(invocation)]
        return result


@pytest.fixture
def scope() -> Iterator[Scope]:
    found: Any = Scope()
    before = list(seam._find_scope)
    seam.install(lambda target, run_manager: found)
    seam.live_scopes.add(id(found))
    yield found
    seam.live_scopes.discard(id(found))
    seam.uninstall()
    seam._find_scope[:] = before


METHODS = ("_generate", "_agenerate", "_stream", "_astream")


def members() -> list[Any]:
    return [vars(cls).get(name) for cls in (BaseChatModel, Model, Streaming) for name in METHODS]


def test_uninstall_restores_every_provider_method() -> None:
    seam.uninstall()
    before = members()
    seam.install(lambda target, run_manager: None)
    assert members() != before
    seam.uninstall()
    assert all(now is then for now, then in zip(members(), before, strict=True))


def test_an_inherited_default_is_never_wrapped(scope: Scope) -> None:
    assert type(Model())._stream is BaseChatModel._stream
    assert not Model()._should_stream(async_api=False, stream=True)
    assert Streaming()._should_stream(async_api=False, stream=True)


def test_wrapper_keeps_the_signature_of_the_method(scope: Scope) -> None:
    assert list(inspect.signature(Model._generate).parameters) == [
        "self",
        "messages",
        "stop",
        "run_manager",
        "kwargs",
    ]
    assert inspect.iscoroutinefunction(FakeListLLM._acall)


def test_calls_and_streams_are_intercepted(scope: Scope) -> None:
    model = Streaming()
    assert model.invoke("hello").content == "answer"
    assert [one.content for one in model.stream("hello")][:2] == ["a", "b"]
    assert [(one.target, one.streams) for one in scope.seen] == [(model, False), (model, True)]


def test_key_depends_on_configuration_and_arguments_only(scope: Scope) -> None:
    def key(model: Model, *args: Any, **kwargs: Any) -> Any:
        scope.seen.clear()
        model.invoke(*args, **kwargs)
        return scope.seen[0].key()

    model = Model()
    assert key(model, "a") == key(model, "a"), "what a model counts of its calls is no configuration"
    assert key(Model(), "a") == key(Model(), [HumanMessage("a")])
    assert key(Model(), "a") == key(Model(tags=["x"], verbose=False), "a")
    different = (key(Model(temperature=1.0), "a"), key(model, "b"), key(model, "a", stop=["x"]), key(model, "a", n=1))
    assert all(one != key(model, "a") for one in different)


def test_generated_message_id_is_not_part_of_the_key() -> None:
    own, none = AIMessage("a", id="msg_1"), AIMessage("a")
    assert seam.message_key(AIMessage("a", id="lc_run--1")) == seam.message_key(none)
    assert seam.message_key(AIMessage("a", id=str(uuid4()))) == seam.message_key(none)
    assert seam.message_key(own) != seam.message_key(none)


def test_wrapper_left_under_a_mock_is_inert_after_uninstall() -> None:
    original = vars(Model)["_generate"]
    seam.install(lambda target, run_manager: None)
    with mock.patch.object(Model, "_generate", lambda self, *args, **kwargs: original(self, *args, **kwargs)):
        seam.uninstall()
    wrapper = vars(Model)["_generate"]
    assert wrapper.__wrapped__ is original
    assert Model().invoke("a").content == "answer"
    seam.uninstall()
    Model._generate = original  # type: ignore[method-assign]


@pytest.mark.parametrize("unpatch_after", ["nothing", "install", "uninstall"])
@pytest.mark.parametrize("is_installed_before", [False, True])
def test_a_patch_across_install_and_uninstall_leaves_the_class_working(
    is_installed_before: bool, unpatch_after: str
) -> None:
    """Each call is made once, by the patch while it holds and by the class's own method after it."""

    class Patched(Model):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            return super()._generate(messages, *args, **kwargs)

    def patch(self: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("patched"))])

    original, model = vars(Patched)["_generate"], Patched()
    if is_installed_before:
        seam.install(lambda target, run_manager: None)
    patcher = mock.patch.object(Patched, "_generate", patch)
    patcher.start()
    steps = {
        "nothing": lambda: None,
        "install": lambda: seam.install(lambda target, run_manager: None),
        "uninstall": seam.uninstall,
    }
    answers = []
    for name in ("nothing", "install", "uninstall"):
        steps[name]()
        answers.append(model.invoke("a").content)
        if name == unpatch_after:
            patcher.stop()
            answers.append(model.invoke("a").content)
    seam.install(lambda target, run_manager: None)
    answers.append(model.invoke("a").content)
    seam.uninstall()

    count = 1 + ["nothing", "install", "uninstall"].index(unpatch_after)
    assert answers == ["patched"] * count + ["answer"] * (5 - count)
    assert model.calls == 5 - count
    assert getattr(vars(Patched)["_generate"], "__wrapped__", original) is original


def test_patch_above_our_wrapper_survives_uninstall() -> None:
    interceptors = MethodInterceptors()

    class Plain:
        def call(self) -> str:
            return "plain"

    def wrap(function: Any) -> Any:
        wrapper = lambda self: f"<{function(self)}>" if interceptors.is_installed else function(self)  # noqa: E731
        wrapper.__wrapped__ = function  # type: ignore[attr-defined]
        return wrapper

    interceptors.install([Plain], {"call": wrap})
    ours = Plain.call
    theirs: Any = lambda self: f"[{ours(self)}]"  # noqa: E731
    theirs.__wrapped__ = ours
    Plain.call = theirs  # type: ignore[method-assign]
    interceptors.install([Plain], {"call": wrap})
    assert Plain().call() == "[<plain>]", "wrapped once"
    interceptors.uninstall()
    assert Plain().call() == "[plain]", "our wrapper below theirs passes calls on"
    assert Plain.call is theirs


def test_class_defined_later_is_intercepted_by_the_next_query(scope: Scope) -> None:
    class Later(Model):
        def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
            return super()._generate(messages, *args, **kwargs)

    class Retriever(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return []

    assert seam.wrap_new_classes()
    Later().invoke("a")
    Retriever().invoke("a")
    assert [type(one.target) for one in scope.seen] == [Later, Later, Retriever]


def seconds_added(call: Callable[[], object], install: Callable[[], object]) -> float:
    """Return the time that interception adds to a call, in seconds: the fastest of many short runs, with and without.

    The two take turns, each run is shorter than a time slice, and time of other processes does not count, so what runs
    beside the test slows both or neither.
    """
    timer = timeit.Timer(call, timer=time.thread_time)
    original, intercepted = list[float](), list[float]()
    try:
        for _ in range(60):
            seam.uninstall()
            original.append(timer.timeit(200))
            install()
            intercepted.append(timer.timeit(200))
    finally:
        seam.uninstall()
    return (min(intercepted) - min(original)) / 200


def test_call_outside_a_query_costs_at_most_three_microseconds() -> None:
    from teola_plugin.adapters.langchain.prefetching import find_scope

    model = Model()
    assert seconds_added(lambda: model._generate([]), lambda: seam.install(find_scope)) < 3e-6


# ------------------------------------------------------------ tools


class Shouting(BaseTool):
    name: str = "shout"
    description: str = "Shouts."

    def _run(self, text: str) -> str:
        return text.upper()


class Claim:
    """A claim that notes every invocation, and makes it."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool = tool
        self.invocations: list[Any] = []

    def result(self, invocation: Any) -> Any:
        self.invocations.append(invocation)
        return invocation.start(None).get()

    async def aresult(self, invocation: Any) -> Any:
        self.invocations.append(invocation)
        return (await invocation.start(None)).get()


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


async def aadd(a: int, b: int = 1) -> int:
    """Add on a loop."""
    return a + b


@pytest.fixture
def claim(scope: Scope) -> Iterator[Claim]:
    made = Claim(StructuredTool.from_function(add, aadd))
    token = seam.tool_claim.set(made)
    yield made
    seam.tool_claim.reset(token)


def methods_of_tools() -> list[Any]:
    return [vars(cls).get(name) for cls in (BaseTool, Tool, StructuredTool, Shouting) for name in ("_run", "_arun")]


def test_uninstall_restores_every_tool_method() -> None:
    seam.uninstall()
    before = methods_of_tools()
    seam.install(lambda target, run_manager: None)
    wrapped = methods_of_tools()
    seam.uninstall()
    assert [new is old for new, old in zip(wrapped, before, strict=True)] == [True, True] + [False] * 5 + [True]
    assert all(new is old for new, old in zip(methods_of_tools(), before, strict=True))


def test_tool_claim_runs_below_callbacks_and_argument_validation(claim: Claim) -> None:
    assert claim.tool.invoke({"a": "2"}) == 3
    assert asyncio.run(claim.tool.ainvoke({"a": 2, "b": 3})) == 5
    first, second = claim.invocations
    assert first.key()[1:] == ("_run", seam.freeze(()), seam.freeze({"a": 2, "b": 1}))
    assert second.key()[1:] == ("_arun", seam.freeze(()), seam.freeze({"a": 2, "b": 3}))


def test_claim_of_one_tool_ignores_other_tools(claim: Claim) -> None:
    assert Shouting().invoke({"text": "a"}) == "A"
    assert StructuredTool.from_function(add).invoke({"a": 1}) == 2
    assert claim.invocations == []


def test_tool_exception_reaches_the_caller_through_its_claim(claim: Claim) -> None:
    def fail(text: str) -> str:
        """Fail."""
        raise ToolException(text)

    claim.tool = StructuredTool.from_function(fail)
    with pytest.raises(ToolException, match="no"):
        claim.tool.invoke({"text": "no"})


def test_arguments_of_a_tool_are_compared_with_their_types() -> None:
    def key(**arguments: Any) -> Any:
        return seam.ToolInvocation(tool, "_run", add, (), arguments).key()

    tool = StructuredTool.from_function(add)
    day = datetime.date(2026, 1, 2)
    assert key(a=1, config={"tags": ["x"]}) == key(a=1, run_manager=object()) == key(a=1)
    assert key(a=day) == key(a=datetime.date(2026, 1, 2))
    assert len({key(a=1), key(a=1.0), key(a=True), key(a="1"), key(a=None), key(b=1), key(a=day)}) == 7


def test_prefetched_tool_call_skips_the_wrappers_of_others(scope: Scope) -> None:
    tool, calls = StructuredTool.from_function(add), list[str]()
    ours = vars(StructuredTool)["_run"]

    def instrumented(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("instrumented")
        return ours(self, *args, **kwargs)

    instrumented.__wrapped__ = ours  # type: ignore[attr-defined]
    with mock.patch.object(StructuredTool, "_run", instrumented):
        invocation = seam.tool_invocation(tool, "_run", (), {"a": 1})
        assert invocation is not None
        invocation.set_config({})
        assert invocation.start(None).get() == 2
    assert calls == []


def test_method_that_is_not_intercepted_cannot_be_prefetched(scope: Scope) -> None:
    tool = StructuredTool.from_function(add)
    with mock.patch.object(StructuredTool, "_run", lambda self, *args, **kwargs: 0):
        assert seam.tool_invocation(tool, "_run", (), {"a": 1}) is None
    assert seam.tool_invocation(Shouting(), "_arun", (), {}) is None
    seam.uninstall()
    assert seam.tool_invocation(tool, "_run", (), {"a": 1}) is None


def test_unprefetched_tool_call_costs_at_most_three_microseconds() -> None:
    tool = Shouting()
    assert seconds_added(lambda: tool._run("a"), lambda: seam.install(lambda target, run_manager: None)) < 3e-6


# ------------------------------------------------------------ calls that an engine answers


class Vectors(Embeddings):
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[0.0] for _ in texts]

    def embed_query(self, text: str) -> list[float]:
        return [0.0]


@pytest.fixture
def routed() -> Iterator[list[tuple[str, Any]]]:
    """Route calls of `Vectors` to an engine that answers 1.0. Return these calls."""
    calls: list[tuple[str, Any]] = []

    def route(target: Any, method: str, original: Any) -> seam.RoutedCall | None:
        def call(target: Any, argument: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append((method, argument))
            return ready([1.0]) if method.startswith("a") else [1.0]

        return seam.RoutedCall(call, False) if isinstance(target, Vectors) else None

    before = list(seam._routes_calls)
    seam.install(lambda target, run_manager: None)
    seam.route_calls(route)
    yield calls
    seam.uninstall()
    seam._routes_calls[:] = before


async def ready(value: Any) -> Any:
    return value


async def test_add_routed_methods_routes_inherited_methods_too(routed: list[Any]) -> None:
    seam.add_routed_methods(Vectors)

    assert Vectors().embed_query("a") == await Vectors().aembed_query("b") == [1.0]

    assert routed == [("embed_query", "a"), ("aembed_query", "b")]


async def test_uninstall_deletes_the_methods_that_were_added(routed: list[Any]) -> None:
    seam.add_routed_methods(Vectors)
    assert "aembed_query" in vars(Vectors)

    seam.uninstall()

    assert "aembed_query" not in vars(Vectors)
    assert await Vectors().aembed_query("b") == [0.0]


def test_add_routed_methods_leaves_streams_to_the_framework(routed: list[Any]) -> None:
    seam.add_routed_methods(Model)

    assert not {"_stream", "_astream"} & vars(Model).keys()
    assert Model._stream is BaseChatModel._stream


def test_route_calls_leaves_other_objects_alone(routed: list[Any]) -> None:
    assert Model().invoke("q").content == "answer"
    assert routed == []


def test_follow_configured_objects_reports_the_configured_copy() -> None:
    noted: list[Any] = []
    seam.install(lambda target, run_manager: None)
    seam.follow_configured_objects(lambda obj, original: noted.append((obj.temperature, original.temperature)))

    Model().configurable_fields(temperature=ConfigurableField(id="t")).invoke("q", {"configurable": {"t": 0.5}})
    seam.uninstall()

    assert noted == [(0.5, 0.0)]
