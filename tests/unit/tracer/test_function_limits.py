"""Tests that the reader of functions never runs user code, raises, takes long, or reads an outdated source."""

from __future__ import annotations

import ast
import asyncio
import builtins
import collections
import linecache
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from pool_leaves import PoolChat, PoolRetriever

from teola_plugin.graph import INPUT, Ref, Role
from teola_plugin.runtime.prefetch_outcomes import OncePerCause
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import FunctionSummary, summarize_function, trace_function
from teola_plugin.tracer.functions import trace as trace_of_functions
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.source import source_of

LLM, RETRIEVER = PoolChat(), PoolRetriever()
PROMPT = ChatPromptTemplate.from_template("Answer {question} with {context}")
STATE = {"state": Ref(INPUT)}


def summarized(func: object, draft: Draft | None = None) -> FunctionSummary:
    return summarize_function(func, STATE, Draft() if draft is None else draft)


def roles(func: object) -> collections.Counter[str]:
    draft = Draft()
    summarized(func, draft)
    return collections.Counter(c.role.name for c in draft.components.values())


# ------------------------------------------------------------ no user code runs


TRIPS: list[str] = []


class UserCodeRan(Exception):
    """Signals that user code ran."""

    def __init__(self, action: str) -> None:
        TRIPS.append(action)


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        raise UserCodeRan(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UserCodeRan("made")

    def __instancecheck__(cls, one: object) -> bool:
        raise UserCodeRan("isinstance")

    def __or__(cls, other: Any) -> Any:
        raise UserCodeRan("|")


class Tripwire(metaclass=Meta):
    """An object that notices whatever is done with it."""

    plain = "a class attribute"

    def __getattribute__(self, name: str) -> Any:
        raise UserCodeRan(name)

    def __getattr__(self, name: str) -> Any:
        raise UserCodeRan(name)

    @property
    def prop(self) -> Any:
        raise UserCodeRan("property")

    def method(self, *args: Any) -> Any:
        raise UserCodeRan("method")

    def _trip(self, *args: Any) -> Any:
        raise UserCodeRan("operator")

    __eq__ = __ne__ = __lt__ = __add__ = __radd__ = __or__ = __ror__ = __bool__ = __len__ = __iter__ = _trip  # type: ignore[assignment]
    __getitem__ = __contains__ = __str__ = __repr__ = __format__ = __call__ = __hash__ = __enter__ = __exit__ = _trip  # type: ignore[assignment]
    __class__ = property(_trip)  # type: ignore[assignment]


class Descriptor:
    def __get__(self, one: Any, kind: Any = None) -> Any:
        raise UserCodeRan("descriptor")

    def __set__(self, one: Any, value: Any) -> None:
        raise UserCodeRan("descriptor")


class Owner:
    descriptor = Descriptor()

    def __init__(self) -> None:
        self.wire = TRIPWIRE
        self.llm = LLM


TRIPWIRE = object.__new__(Tripwire)
OWNER = Owner()


def touches(state: Any) -> Any:
    a = f"{TRIPWIRE} {TRIPWIRE.prop!r:>5} {OWNER.descriptor} {TRIPWIRE.plain}"
    b = [
        TRIPWIRE + 1,
        TRIPWIRE | PROMPT,
        PROMPT | TRIPWIRE,
        1 in TRIPWIRE,
        TRIPWIRE == 1,
        not TRIPWIRE,
        TRIPWIRE and 1,
        TRIPWIRE[0],
        -len(TRIPWIRE),
    ]
    c = [x for x in TRIPWIRE if x.ok] + [TRIPWIRE.method(x) for x in state["items"]]
    d, *e = TRIPWIRE
    f = Tripwire(1) if isinstance(state, Tripwire) else Tripwire.anything
    g = {**TRIPWIRE, "k": TRIPWIRE, TRIPWIRE: 1}
    TRIPWIRE.attribute = TRIPWIRE.method
    TRIPWIRE["key"] = 1
    h = sorted([3, 1], key=TRIPWIRE.method) or max(state["items"], key=TRIPWIRE)
    i = PROMPT.invoke({"question": TRIPWIRE, "context": OWNER.wire})
    j = LLM.invoke([HumanMessage(content=TRIPWIRE), TRIPWIRE, ("system", TRIPWIRE)], config=TRIPWIRE)
    k = LLM.bind(stop=TRIPWIRE).with_config(TRIPWIRE).invoke(TRIPWIRE)
    m = RETRIEVER.map().batch(TRIPWIRE, **TRIPWIRE)
    n = f"{TRIPWIRE}{TRIPWIRE}" + "%s" % TRIPWIRE + ", ".join(TRIPWIRE) + ", ".join([TRIPWIRE])  # noqa: UP031
    if TRIPWIRE or OWNER.wire is None:
        o = OWNER.llm.invoke("after")
    for p in TRIPWIRE:
        print(p, TRIPWIRE)
    with TRIPWIRE as q:
        return a, b, c, d, e, f, g, h, i, j, k, m, n, o, q
    return LLM.invoke("never")


def test_reading_a_function_runs_no_user_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "teola_plugin")
    draft = Draft()
    TRIPS.clear()
    summary = summarize_function(touches, STATE, draft)
    assert TRIPS == [] and caplog.records == []
    assert not summary.reached_end and summary.runs_user_code
    assert summarize_function(TRIPWIRE, STATE, draft) == summarize_function(Tripwire, STATE, draft) == FunctionSummary()
    assert TRIPS == []


def test_an_error_of_the_reader_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of ours is logged: nothing of the function is prefetched, call after call."""

    def breaks(*_: Any) -> None:
        raise ArithmeticError("in the reader")

    monkeypatch.setattr(trace_of_functions, "_warned", OncePerCause())
    monkeypatch.setattr(FunctionInterpreter, "run_function", breaks)
    for _ in range(3):
        assert not summarize_function(touches, STATE, Draft()).reached_end
    [record] = caplog.records
    assert record.levelname == "WARNING" and "touches" in record.getMessage() and "report it" in record.getMessage()


class Recorder:
    """A callable object that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.llm = LLM

    def __call__(self, state: Any) -> Any:
        self.calls.append("called")
        self.note()
        return {"answer": self.llm.invoke(state["question"])}

    def note(self) -> None:
        self.calls.append("noted")


def test_a_function_that_is_read_is_not_called() -> None:
    recorder = Recorder()
    assert summarized(recorder).uses_engines and recorder.calls == []


# ------------------------------------------------------------ sources


def generator(state: Any) -> Iterator[Any]:
    yield LLM.invoke(state["question"])


async def agenerator(state: Any) -> Any:
    yield await LLM.ainvoke(state["question"])


def anything(*args: Any, **kwargs: Any) -> Any:
    return LLM.invoke(args[0])


TWO_LAMBDAS = (lambda state: LLM.invoke(state["a"]), lambda state: (lambda text: LLM.invoke(text))(state["b"]))
EXEC_GLOBALS: dict[str, Any] = {"LLM": LLM}
exec("def executed(state):\n    return LLM.invoke(state['question'])", EXEC_GLOBALS)


@pytest.mark.parametrize(
    "func",
    [
        generator,
        agenerator,
        anything,
        EXEC_GLOBALS["executed"],
        len,
        dict,
        Owner,
        None,
        3,
        "text",
        LLM,
    ],
    ids=lambda func: getattr(type(func), "__name__", "?"),
)
def test_callables_without_readable_source_are_left_alone(func: object) -> None:
    assert summarized(func) == FunctionSummary()
    assert trace_function(func, ["state"]).template.components == ()


def test_lambdas_on_one_line_are_distinguished() -> None:
    for func, key in zip(TWO_LAMBDAS, "ab", strict=True):
        definition = source_of(func.__code__)
        assert isinstance(definition, ast.Lambda)
        assert f"state['{key}']" in ast.unparse(definition)
        assert trace_function(func, ["state"]).template.components


def module(folder: Path, text: str) -> ModuleType:
    path = folder / "nodes_of_a_user.py"
    path.write_text(text)
    result = ModuleType("nodes_of_a_user")
    result.__dict__["LLM"] = LLM
    exec(compile(text, str(path), "exec"), result.__dict__)
    return result


NODE = """
def node(state):
    return {"answer": LLM.invoke(f"Answer {state['question']}")}
"""


@pytest.mark.parametrize(
    ("after", "asks"),
    [
        (NODE, True),
        (NODE + "\n\ndef more(state):\n    return state\n", True),
        (NODE.replace("return", "# a comment\n    return"), True),
        (NODE.replace("Answer", "Refuse"), False),
        (NODE.replace("LLM.invoke", "OTHER.invoke"), False),
        ("\n\n" + NODE, False),
        ("def node(state) return", False),
        ("", False),
    ],
)
def test_a_source_that_differs_from_the_code_is_not_used(tmp_path: Path, after: str, asks: bool) -> None:
    source_of.cache_clear()
    nodes = module(tmp_path, NODE)
    (tmp_path / "nodes_of_a_user.py").write_text(after)
    linecache.checkcache()
    assert summarized(nodes.node).uses_engines == asks


def test_a_source_is_read_once(tmp_path: Path) -> None:
    source_of.cache_clear()
    nodes = module(tmp_path, NODE)
    assert summarized(nodes.node).uses_engines
    (tmp_path / "nodes_of_a_user.py").unlink()
    linecache.checkcache()
    assert summarized(nodes.node).uses_engines


# ------------------------------------------------------------ no end


def recursive(state: Any, depth: int = 0) -> Any:
    LLM.invoke(f"{depth}: {state['question']}")
    return recursive(state, depth + 1)


def mutual(state: Any) -> Any:
    return recursive(state) + mutual(state)


def endless(state: Any) -> Any:
    while True:
        state = LLM.invoke(state["question"])


def nested(state: Any) -> Any:
    out = 0
    for a in range(16):
        for b in range(16):
            for c in range(16):
                for d in range(16):
                    out += a * b * c * d
    return LLM.invoke(f"{out}")


def doubling(state: Any) -> Any:
    text = state["question"]
    for _ in ("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o"):
        text = text.strip() + text.strip()
    return LLM.invoke(text)


def forked(state: Any) -> Any:
    """Return a function with eight unknown conditions, each with a model call in a branch."""
    if state["a"]:
        LLM.invoke("a")
    if state["b"]:
        LLM.invoke("b")
    if state["c"]:
        return LLM.invoke("c")
    if state["d"]:
        return LLM.invoke("d")
    if state["e"]:
        return LLM.invoke("e")
    if state["f"]:
        return LLM.invoke("f")
    if state["g"]:
        return LLM.invoke("g")
    if state["h"]:
        return LLM.invoke("h")
    return LLM.invoke("i")


@pytest.mark.parametrize("func", [recursive, mutual, endless, nested, doubling, forked])
def test_reading_any_function_takes_limited_time(func: Callable[..., Any]) -> None:
    summarized(func)  # its file is read
    start = time.thread_time()  # of this thread alone, whatever else runs here
    summarized(func)
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize(
    "text",
    [
        f"return LLM.invoke({' + '.join(['state[0]'] * 600)})",
        f"return LLM.invoke({'(' * 80}state[0]{')' * 80})",
        f"return LLM.invoke(state{'.a' * 500})",
        "\n    ".join(f"x{i} = state['a'] + str({i})" for i in range(3000)) + "\n    return LLM.invoke(x2999)",
        f"return [{', '.join(['LLM.invoke(state[0])'] * 500)}]",
    ],
    ids=["long sum", "parentheses", "attributes", "many lines", "many calls"],
)
def test_reading_long_functions_takes_limited_time(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    nodes = module(tmp_path, f"def node(state):\n    {text}\n")
    summarized(nodes.node)
    start = time.thread_time()
    summarized(nodes.node)
    assert time.thread_time() - start < 1.0
    assert "is a bug of teola-plugin" not in caplog.text


def test_reading_library_functions_raises_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of functions that nobody wrote for this: what is not understood is left alone, quietly."""
    caplog.set_level("DEBUG", "teola_plugin")
    import langchain_core.prompts.chat
    import langchain_core.utils.function_calling

    modules = [asyncio, asyncio.base_events, collections, linecache, langchain_core.prompts.chat]
    modules += [langchain_core.utils.function_calling, sys.modules["typing"], sys.modules["inspect"]]
    functions = [one for module in modules for one in _functions(module)]
    for one in functions:
        names = one.__code__.co_varnames[: one.__code__.co_argcount]
        summarize_function(one, {name: Ref(INPUT).at(name) for name in names}, Draft(), state=names[0] if names else "")
    assert len(functions) > 400
    assert [record.message for record in caplog.records if "not " in record.message] == []


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    for one in list(vars(module).values()):
        for inner in [one, *(vars(one).values() if isinstance(one, type) else ())]:
            if type(inner) is FunctionType and inner.__module__ == module.__name__:
                yield inner


# ------------------------------------------------------------ order


def unknown_in_between(state: Any) -> Any:
    LLM.invoke("first")
    Path(state["path"]).touch()
    documents = RETRIEVER.invoke(state["question"])
    return {"documents": documents}


def harmless_in_between(state: Any) -> Any:
    LLM.invoke("first")
    print(time.time(), len(state["question"]))
    return {"documents": RETRIEVER.invoke(state["question"])}


def test_user_code_becomes_a_component_in_source_order() -> None:
    draft = Draft()
    summary = summarized(unknown_in_between, draft)
    (code,) = [c.name for c in draft.components.values() if c.role is Role.OPAQUE]
    first, search = (next(n for n in draft.components if word in n) for word in ("model.message", "retrieve"))
    assert {(first, code), (code, search)} <= set(draft.order)
    assert summary.reached_end and summary.runs_user_code
    assert not summarized(harmless_in_between).runs_user_code and "OPAQUE" not in roles(harmless_in_between)


def test_print_is_harmless_after_ray_has_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "print", pytest.importorskip("ray.experimental.tqdm_ray").safe_print)
    assert not summarized(harmless_in_between).runs_user_code


def test_print_that_the_app_has_replaced_is_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_and_write(*values: object) -> None:
        Path(str(values[0])).touch()

    monkeypatch.setattr(builtins, "print", print_and_write)
    assert summarized(harmless_in_between).runs_user_code


@tool
def look_up(query: str) -> str:
    """Looks it up."""
    return "\n".join(d.page_content for d in RETRIEVER.invoke(query))


@tool
async def alook_up(query: str) -> str:
    """Looks it up."""
    return "\n".join(d.page_content for d in await RETRIEVER.ainvoke(query))


def calls_a_tool(state: Any) -> Any:
    return {"messages": [AIMessage(look_up.invoke({"query": state["question"]}))]}


def test_tools_made_of_functions_are_traced_as_retrievals() -> None:
    for one in (look_up, alook_up):
        assert [c.role.name for c in trace_function(one, ["query"]).template.components] == [
            "RETRIEVAL",
            "CALL",
            "CALL",
        ]
    assert roles(calls_a_tool)["RETRIEVAL"] == 1
