"""What a walk of a function's source never does: run user code, raise, take long, believe a source that is another."""

from __future__ import annotations

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
from teola_plugin.runtime.dead_parts import Once
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import FunctionSummary, summarize_function, trace_function
from teola_plugin.tracer.functions import trace as trace_of_functions
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.source import source_of

LLM, RETRIEVER = PoolChat(), PoolRetriever()
PROMPT = ChatPromptTemplate.from_template("Answer {question} with {context}")
STATE = {"state": Ref(INPUT)}


def walked(func: object, draft: Draft | None = None) -> FunctionSummary:
    return summarize_function(func, STATE, Draft() if draft is None else draft)


def roles(func: object) -> collections.Counter[str]:
    draft = Draft()
    walked(func, draft)
    return collections.Counter(c.role.name for c in draft.components.values())


# ------------------------------------------------------------ no user code runs


RAN: list[str] = []


class Trip(Exception):
    """User code ran."""

    def __init__(self, what: str) -> None:
        RAN.append(what)


class Meta(type):
    def __getattr__(cls, name: str) -> Any:
        raise Trip(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise Trip("made")

    def __instancecheck__(cls, one: object) -> bool:
        raise Trip("isinstance")

    def __or__(cls, other: Any) -> Any:
        raise Trip("|")


class Wire(metaclass=Meta):
    """Whatever is done with it is noticed."""

    plain = "a class attribute"

    def __getattribute__(self, name: str) -> Any:
        raise Trip(name)

    def __getattr__(self, name: str) -> Any:
        raise Trip(name)

    @property
    def prop(self) -> Any:
        raise Trip("property")

    def method(self, *args: Any) -> Any:
        raise Trip("method")

    def _trip(self, *args: Any) -> Any:
        raise Trip("operator")

    __eq__ = __ne__ = __lt__ = __add__ = __radd__ = __or__ = __ror__ = __bool__ = __len__ = __iter__ = _trip  # type: ignore[assignment]
    __getitem__ = __contains__ = __str__ = __repr__ = __format__ = __call__ = __hash__ = __enter__ = __exit__ = _trip  # type: ignore[assignment]
    __class__ = property(_trip)  # type: ignore[assignment]


class Descriptor:
    def __get__(self, one: Any, kind: Any = None) -> Any:
        raise Trip("descriptor")

    def __set__(self, one: Any, value: Any) -> None:
        raise Trip("descriptor")


class Owner:
    held = Descriptor()

    def __init__(self) -> None:
        self.wire = WIRE
        self.llm = LLM


WIRE = object.__new__(Wire)
OWNER = Owner()


def touches(state: Any) -> Any:
    a = f"{WIRE} {WIRE.prop!r:>5} {OWNER.held} {WIRE.plain}"
    b = [WIRE + 1, WIRE | PROMPT, PROMPT | WIRE, 1 in WIRE, WIRE == 1, not WIRE, WIRE and 1, WIRE[0], -len(WIRE)]
    c = [x for x in WIRE if x.ok] + [WIRE.method(x) for x in state["items"]]
    d, *e = WIRE
    f = Wire(1) if isinstance(state, Wire) else Wire.anything
    g = {**WIRE, "k": WIRE, WIRE: 1}
    WIRE.attribute = WIRE.method
    WIRE["key"] = 1
    h = sorted([3, 1], key=WIRE.method) or max(state["items"], key=WIRE)
    i = PROMPT.invoke({"question": WIRE, "context": OWNER.wire})
    j = LLM.invoke([HumanMessage(content=WIRE), WIRE, ("system", WIRE)], config=WIRE)
    k = LLM.bind(stop=WIRE).with_config(WIRE).invoke(WIRE)
    m = RETRIEVER.map().batch(WIRE, **WIRE)
    n = f"{WIRE}{WIRE}" + "%s" % WIRE + ", ".join(WIRE) + ", ".join([WIRE])  # noqa: UP031
    if WIRE or OWNER.wire is None:
        o = OWNER.llm.invoke("after")
    for p in WIRE:
        print(p, WIRE)
    with WIRE as q:
        return a, b, c, d, e, f, g, h, i, j, k, m, n, o, q
    return LLM.invoke("never")


def test_no_user_code_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "teola_plugin")
    draft = Draft()
    RAN.clear()
    made = summarize_function(touches, STATE, draft)
    assert RAN == [] and caplog.records == []
    assert not made.reached_end and made.runs_user_code
    assert summarize_function(WIRE, STATE, draft) == summarize_function(Wire, STATE, draft) == FunctionSummary()
    assert RAN == []


def test_a_walk_that_breaks_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """That would be a fault of ours, and nothing of the function would begin early, call after call."""

    def breaks(*_: Any) -> None:
        raise ArithmeticError("in the walk")

    monkeypatch.setattr(trace_of_functions, "_warned", Once())
    monkeypatch.setattr(FunctionInterpreter, "run_function", breaks)
    for _ in range(3):
        assert not summarize_function(touches, STATE, Draft()).reached_end
    [said] = caplog.records
    assert said.levelname == "WARNING" and "touches" in said.getMessage() and "report it" in said.getMessage()


class Loud:
    """Says what is done with it."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.llm = LLM

    def __call__(self, state: Any) -> Any:
        self.heard.append("called")
        self.note()
        return {"answer": self.llm.invoke(state["question"])}

    def note(self) -> None:
        self.heard.append("noted")


def test_what_is_walked_does_not_happen() -> None:
    loud = Loud()
    assert walked(loud).uses_engines and loud.heard == []


# ------------------------------------------------------------ sources


def generator(state: Any) -> Iterator[Any]:
    yield LLM.invoke(state["question"])


async def agenerator(state: Any) -> Any:
    yield await LLM.ainvoke(state["question"])


def anything(*args: Any, **kwargs: Any) -> Any:
    return LLM.invoke(args[0])


TWO = (lambda state: LLM.invoke(state["a"]), lambda state: LLM.invoke(state["b"]))
MADE: dict[str, Any] = {"LLM": LLM}
exec("def executed(state):\n    return LLM.invoke(state['question'])", MADE)


@pytest.mark.parametrize(
    "func",
    [generator, agenerator, anything, TWO[0], TWO[1], MADE["executed"], len, dict, Owner, None, 3, "text", LLM],
    ids=lambda func: getattr(type(func), "__name__", "?"),
)
def test_what_has_no_source_that_is_understood_is_left_alone(func: object) -> None:
    assert walked(func) == FunctionSummary()
    assert trace_function(func, ["state"]).template.components == ()


def module(folder: Path, text: str) -> ModuleType:
    path = folder / "nodes_of_a_user.py"
    path.write_text(text)
    made = ModuleType("nodes_of_a_user")
    made.__dict__["LLM"] = LLM
    exec(compile(text, str(path), "exec"), made.__dict__)
    return made


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
def test_a_source_that_is_another_is_not_believed(tmp_path: Path, after: str, asks: bool) -> None:
    source_of.cache_clear()
    made = module(tmp_path, NODE)
    (tmp_path / "nodes_of_a_user.py").write_text(after)
    linecache.checkcache()
    assert walked(made.node).uses_engines == asks


def test_a_source_is_read_once(tmp_path: Path) -> None:
    source_of.cache_clear()
    made = module(tmp_path, NODE)
    assert walked(made.node).uses_engines
    (tmp_path / "nodes_of_a_user.py").unlink()
    linecache.checkcache()
    assert walked(made.node).uses_engines


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
    """Sixteen conditions that are not known, each with a model on either way."""
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
def test_the_walk_ends_soon(func: Callable[..., Any]) -> None:
    walked(func)  # its file is read
    began = time.thread_time()  # of this thread alone, whatever else runs here
    walked(func)
    assert time.thread_time() - began < 0.5


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
def test_long_functions(tmp_path: Path, text: str) -> None:
    made = module(tmp_path, f"def node(state):\n    {text}\n")
    walked(made.node)
    began = time.thread_time()
    walked(made.node)
    assert time.thread_time() - began < 1.0


def test_functions_of_the_standard_library_and_frameworks_raise_nothing(caplog: pytest.LogCaptureFixture) -> None:
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
    found = RETRIEVER.invoke(state["question"])
    return {"documents": found}


def harmless_in_between(state: Any) -> Any:
    LLM.invoke("first")
    print(time.time(), len(state["question"]))
    return {"documents": RETRIEVER.invoke(state["question"])}


def test_unknown_code_stands_in_the_order() -> None:
    draft = Draft()
    made = walked(unknown_in_between, draft)
    (code,) = [c.name for c in draft.components.values() if c.role is Role.OPAQUE]
    first, found = (next(n for n in draft.components if word in n) for word in ("model.message", "retrieve"))
    assert {(first, code), (code, found)} <= set(draft.order)
    assert made.reached_end and made.runs_user_code
    assert not walked(harmless_in_between).runs_user_code and "OPAQUE" not in roles(harmless_in_between)


def test_print_is_harmless_after_ray_has_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "print", pytest.importorskip("ray.experimental.tqdm_ray").safe_print)
    assert not walked(harmless_in_between).runs_user_code


def test_print_that_the_app_has_replaced_is_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def print_and_write(*values: object) -> None:
        Path(str(values[0])).touch()

    monkeypatch.setattr(builtins, "print", print_and_write)
    assert walked(harmless_in_between).runs_user_code


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


def test_tools_made_of_functions() -> None:
    for one in (look_up, alook_up):
        assert [c.role.name for c in trace_function(one, ["query"]).template.components] == [
            "RETRIEVAL",
            "CALL",
            "CALL",
        ]
    assert roles(calls_a_tool)["RETRIEVAL"] == 1
