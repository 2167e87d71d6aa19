"""User code that records when and where it runs. It must run as often as in the original graph, and nowhere else."""

from __future__ import annotations

import asyncio
import functools
import operator
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Annotated, Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy
from pydantic import BaseModel
from typing_extensions import TypedDict

from support.graphs.ahead import in_a_row
from support.graphs.case import Turn, case
from support.graphs.kit import Kit, Stop
from teola_plugin.langchain import ChatTeola


class State(TypedDict, total=False):
    question: Any
    first: Any
    second: Any
    answer: Any
    said: Annotated[list[Any], operator.add]


class Telling:
    """A value of the user's own class that records each use of its methods."""

    def __init__(self, kit: Kit, text: str) -> None:
        self._kit, self._text = kit, text

    @property
    def text(self) -> str:
        self._kit.note("text")
        return self._text

    def __str__(self) -> str:
        self._kit.note("str")
        return self._text

    def __format__(self, how: str) -> str:
        self._kit.note("format")
        return format(self._text, how)

    def __len__(self) -> int:
        self._kit.note("len")
        return len(self._text)

    def __iter__(self) -> Iterator[str]:
        self._kit.note("iter")
        return iter([self._text])

    def __getitem__(self, key: Any) -> str:
        self._kit.note("getitem")
        return self._text

    def __eq__(self, other: object) -> bool:
        self._kit.note("eq")
        return isinstance(other, Telling) and other._text == self._text

    def __hash__(self) -> int:
        self._kit.note("hash")
        return hash(self._text)

    def __add__(self, other: str) -> str:
        self._kit.note("add")
        return self._text + other

    def __radd__(self, other: str) -> str:
        self._kit.note("radd")
        return other + self._text

    def __deepcopy__(self, memo: Any) -> Telling:
        self._kit.note("deepcopy")
        return self

    def __reduce__(self) -> Any:
        self._kit.note("reduce")
        return super().__reduce__()


@case({"question": "anything"})
def telling_values(kit: Kit) -> Any:
    """Build a graph whose first node makes a `Telling`. The others use it in every way. There is no checkpointer."""
    llm, retriever = kit.llm, kit.retriever

    def make(state: State) -> dict[str, Any]:
        return {"first": Telling(kit, "told")}

    def use(state: State) -> dict[str, Any]:
        said = [llm.invoke(f"a {state['first']}").content, llm.invoke("b " + state["first"]).content]
        said.append(llm.invoke("c {}".format(state["first"])).content)
        said.append(llm.invoke(state["first"].text).content)
        return {"said": said}

    def again(state: State) -> dict[str, Any]:
        words = [llm.invoke(f"d {word}").content for word in state["first"]]
        if len(state["first"]) > 2:
            words.append(retriever.invoke(state["first"][0])[0].page_content)
        return {"said": words}

    def last(state: State) -> dict[str, Any]:
        text = ChatPromptTemplate.from_template("e {first}").invoke({"first": state["first"]})
        return {"second": llm.invoke(text).content}

    return in_a_row(make, use, again, last, state=State)


@case({"question": "anything"})
def values_that_a_look_changes(kit: Kit) -> Any:
    """Build a graph with values that change when read: iterators and dictionaries that grow.

    There is no checkpointer.
    """
    llm = kit.llm

    def make(state: State) -> dict[str, Any]:
        return {"first": iter(["a", "b", "c"]), "second": defaultdict(list, known=["x"])}

    def use(state: State) -> dict[str, Any]:
        said = [llm.invoke(f"about {word}").content for word in state["first"]]
        return {"said": [*said, llm.invoke(f"more {state['second']['missing']}").content]}

    def grown(state: State) -> dict[str, Any]:
        state["second"]["late"].append(1)
        return {"answer": sorted(state["second"])}

    return in_a_row(make, use, grown, state=State)


class Pieces(dict[str, Any]):
    """A dict of the user's own that records the keys which are read."""

    kit: Any = None

    def __getitem__(self, key: str) -> Any:
        self.kit.note(f"key {key}")
        return super().__getitem__(key)


class Ear:
    """An object inside a state that records side effects."""

    def __init__(self, kit: Kit) -> None:
        self.note = kit.note


class Watched(BaseModel):
    """A state of the user's own class with a property that records its use."""

    question: str = ""
    ear: Any = None
    said: Annotated[list[str], operator.add] = []

    @property
    def louder(self) -> str:
        if self.ear is not None:
            self.ear.note("louder")
        return self.question.upper()


@case({"question": "q"})
def telling_states(kit: Kit) -> Any:
    """Build a graph with a state whose properties record their use, and with dictionaries that record look-ups."""
    llm = kit.llm

    def first(state: Watched) -> dict[str, Any]:
        return {"said": [llm.invoke(f"first {state.louder}").content], "ear": Ear(kit)}

    def second(state: Watched) -> dict[str, Any]:
        pieces = Pieces(name=state.question)
        pieces.kit = kit
        return {"said": [llm.invoke(f"second {state.louder} {pieces['name']}").content]}

    return in_a_row(first, second, state=Watched)


class OwnPrompt(ChatPromptTemplate):
    """A prompt that records when it is formatted."""

    def format_messages(self, **kwargs: Any) -> Any:
        told = kwargs.pop("told")
        told.append(kwargs["question"])
        return super().format_messages(**kwargs)


class OwnParser(BaseOutputParser[str]):
    """A parser that records when it runs."""

    told: Any = None

    def parse(self, text: str) -> str:
        self.told.note("parsed")
        return text.upper()


class OwnModel(ChatTeola):
    """A model of the user's own class on the pool that records its calls."""

    told: Any = None

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        self.told.note("own model")
        return super()._generate(messages, stop, run_manager, **kwargs)


class Handler(BaseCallbackHandler):
    """A callback handler that belongs to one model, and records its calls."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.kit.note("model heard")


class Office:
    """An object that returns models by a property, an attribute, a method and a context manager.

    It records each use.
    """

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    @property
    def llm(self) -> Any:
        self.kit.note("property")
        return self.kit.llm

    def __getattr__(self, name: str) -> Any:
        if name != "spare":
            raise AttributeError(name)
        self.kit.note("getattr")
        return self.kit.llm

    def hired(self) -> Any:
        self.kit.note("hired")
        return self.kit.llm

    def __enter__(self) -> Any:
        self.kit.note("entered")
        return self.kit.llm

    def __exit__(self, *_: Any) -> None:
        self.kit.note("left")


@case({"question": "q"})
def telling_objects(kit: Kit) -> Any:
    """Build a graph with models behind properties, methods, context managers and functions that record their use."""
    office, drawer = Office(kit), {"llm": kit.llm}

    def given_by_a_function() -> Any:
        kit.note("given")
        return drawer["llm"]

    def first(state: State) -> dict[str, Any]:
        said = [office.llm.invoke(f"a {state['question']}").content, office.spare.invoke("b").content]
        return {"said": [*said, office.hired().invoke(f"c {state['question']}").content]}

    def second(state: State) -> dict[str, Any]:
        with office as llm:
            said = llm.invoke(f"d {state['question']}").content
        return {"said": [said, given_by_a_function().invoke(f"e {state['question']}").content]}

    def third(state: State) -> dict[str, Any]:
        models = {"llm": office.llm}
        return {"answer": models["llm"].invoke(f"f {state['question']}").content}

    return in_a_row(first, second, third, state=State, checkpointer=kit.saver)


@case({"question": "q"}, not_by="batch")
def telling_parts(kit: Kit) -> Any:
    """Build a graph whose nodes call chains of own prompts, parsers, models and handlers that record their use."""
    told: list[str] = []
    prompt = OwnPrompt.from_template("say {question}")
    model, heard = OwnModel(pool=kit.pool, max_tokens=12, told=kit), kit.llm.with_config(callbacks=[Handler(kit)])
    step = RunnableLambda(lambda text: (kit.note("step"), text.content)[1])
    parser = OwnParser(told=kit)

    def first(state: State) -> dict[str, Any]:
        return {"first": (prompt | kit.llm).invoke({"question": state["question"], "told": told}).content}

    def second(state: State) -> dict[str, Any]:
        return {"second": (ChatPromptTemplate.from_template("more {question}") | kit.llm | parser).invoke(state)}

    def third(state: State) -> dict[str, Any]:
        said = (ChatPromptTemplate.from_template("x {question}") | kit.llm | step).invoke(state)
        return {"said": [said, model.invoke(f"own {state['question']}").content, heard.invoke("heard").content]}

    def fourth(state: State) -> dict[str, Any]:
        kit.note(f"formatted {len(told)} {told[-1]}")
        said = kit.llm.invoke(f"fourth {state['question']}", {"callbacks": [Handler(kit)], "tags": ["of-the-call"]})
        return {"answer": said.content}

    return in_a_row(first, second, third, fourth, state=State, checkpointer=kit.saver)


@case({"question": "q"}, {"question": "qq"}, not_by="batch")
def telling_routers(kit: Kit) -> Any:
    """Build a graph whose routers, reducers and key functions record their use."""
    llm = kit.llm

    def reduce(old: list[str] | None, new: list[str]) -> list[str]:
        return [*(old or []), *new, str(len(new))]

    kind = {"question": str, "said": Annotated[list[str], reduce]}
    told: Any = TypedDict("told", kind, total=False)  # type: ignore[operator]

    def start(state: Any) -> dict[str, Any]:
        return {"said": [llm.invoke(f"start {state['question']}").content]}

    def route(state: Any) -> str:
        kit.note(f"routed {len(state['question'])}")
        return "one" if len(state["question"]) < 2 else "two"

    def key(state: Any) -> str:
        kit.note("key made")
        return str(state["question"])

    graph = StateGraph(told)
    graph.add_node(start)
    graph.add_node("one", lambda state: {"said": [llm.invoke(f"one {state['question']}").content]})
    graph.add_node(
        "two",
        lambda state: {"said": [llm.invoke(f"two {state['question']}").content]},
        cache_policy=CachePolicy(key_func=key),
    )
    graph.add_edge(START, "start")
    graph.add_conditional_edges("start", route, ["one", "two"])
    return graph.compile(checkpointer=kit.saver, cache=kit.cache)


_OF_THE_CALLER: ContextVar[str] = ContextVar("of_the_caller", default="nothing")
_OF_A_NODE: ContextVar[str] = ContextVar("of_a_node", default="nothing")


def _where(kit: Kit, what: str) -> None:
    """Record the thread, the loop and the context variables of the running code."""
    thread = "main" if threading.current_thread() is threading.main_thread() else "another"
    try:
        loop = "in a task" if asyncio.current_task() else "in a loop"
    except RuntimeError:
        loop = "no loop"
    kit.note(f"{what}: {thread} thread, {loop}, {_OF_THE_CALLER.get()}, {_OF_A_NODE.get()}")


@case({"question": "q"}, races=True, not_by="batch")
def where_nodes_run(kit: Kit) -> Any:
    """Build a graph whose nodes record on which thread and loop they run, and with which context variables."""
    llm = kit.llm
    _OF_THE_CALLER.set("something")

    def node(name: str) -> Any:
        def run(state: State, config: RunnableConfig) -> dict[str, Any]:
            _where(kit, f"{name} {sorted(config['metadata'])}")
            _OF_A_NODE.set(name)
            return {"said": [llm.invoke(f"{name} {state['question']}").text]}

        return run

    def route(state: State) -> str:
        _where(kit, "route")
        return "last"

    graph = StateGraph(State)
    for name in ("first", "left", "right", "last"):
        graph.add_node(name, node(name))
    graph.add_edge(START, "first")
    graph.add_edge("first", "left")
    graph.add_edge("first", "right")
    graph.add_conditional_edges("left", route, ["last"])
    return graph.compile(checkpointer=kit.saver)


class Worker:
    """An object whose method and whose call are nodes."""

    def __init__(self, kit: Kit) -> None:
        self.llm, self.how = kit.llm, "gently"

    def method(self, state: State) -> dict[str, Any]:
        return {"first": self.llm.invoke(f"{self.how} {state['question']}").content}

    def __call__(self, state: State, config: RunnableConfig, *, store: Any = None) -> dict[str, Any]:
        return {"second": self.llm.invoke(f"called {state['question']} {store is None}").content}


def _three(llm: Any, how: str, state: State) -> dict[str, Any]:
    return {"said": [llm.invoke(f"{how} {state['question']}").content]}


@case({"question": "q"})
def kinds_of_nodes(kit: Kit) -> Any:
    """Build a graph of methods, objects, partials, decorated functions, lambdas and functions with defaults."""
    llm = kit.llm

    def loudly(function: Any) -> Any:
        @functools.wraps(function)
        def run(state: State) -> dict[str, Any]:
            return {"said": [str(function(state)["said"][0]).upper()]}

        return run

    @loudly
    def decorated(state: State) -> dict[str, Any]:
        return {"said": [llm.invoke(f"decorated {state['question']}").content]}

    def defaults(state: State, how: str = "well", *, more: int = 2) -> dict[str, Any]:
        return {"said": [llm.invoke(f"{how} {more} {state['question']}").content]}

    def branches(state: State) -> dict[str, Any]:
        question = state["question"]
        with_all = state.get("said") or []
        try:
            text = f"{question!r:>8} {len(with_all):03d} {question.upper() if question else 'none'}"
        finally:
            kit.note("finally")
        if (size := len(text)) > 100:
            return {"answer": "long"}
        for _ in range(2):
            text = "; ".join([text, *(f"{at}:{word[:2]}" for at, word in enumerate(with_all))])
        parts = {"text": text, "size": size}
        return {"answer": llm.invoke("%s of %d" % (parts["text"], parts["size"])).content}  # noqa: UP031

    worker = Worker(kit)
    graph = StateGraph(State)
    graph.add_sequence(
        [
            worker.method,
            ("object", worker),
            ("partial", functools.partial(_three, llm, "partly")),
            ("decorated", decorated),
            ("lambda", lambda state: {"said": [llm.invoke(state["question"] * 2).content]}),
            defaults,
            branches,
        ]
    )
    graph.add_edge(START, "method")
    return graph.compile(checkpointer=kit.saver)


@case({"question": "q"}, Turn(None), not_by="batch")
def stopped_for_good(kit: Kit) -> Any:
    """Build a graph with a node that ends the program. Prefetched calls must end, too."""
    llm = kit.llm

    def first(state: State) -> dict[str, Any]:
        return {"first": llm.invoke(f"first {state['question']}").content}

    def second(state: State) -> dict[str, Any]:
        if kit.before("stopped") == 0:
            raise Stop("now")
        return {"second": llm.invoke(f"second {state['question']}").content}

    def third(state: State) -> dict[str, Any]:
        return {"answer": llm.invoke(f"third {state['question']}").content}

    return in_a_row(first, second, third, state=State, checkpointer=kit.saver)


@case({"question": "what is with?"}, not_by="batch")
def changed_between_calls(kit: Kit) -> Any:
    """Build a graph whose closures change in every round, and with a model that is created in the node."""
    closed = {"how": "first", "rounds": 0}
    llm = kit.llm

    def ask(state: State) -> dict[str, Any]:
        made = ChatTeola(pool=kit.pool, max_tokens=3 + int(closed["rounds"]))
        said = [made.invoke(f"{closed['how']} {state['question']}").content, llm.invoke(closed["how"]).content]
        closed["how"] = f"round {len(state.get('said', []))}"
        closed["rounds"] = int(closed["rounds"]) + 1
        return {"said": said}

    def find(state: State) -> dict[str, Any]:
        found: list[Document] = kit.retriever.invoke(str(closed["how"]))
        return {"first": [document.page_content for document in found]}

    graph = StateGraph(State)
    graph.add_node(ask)
    graph.add_node(find)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "find")
    graph.add_conditional_edges("find", lambda state: END if len(state["said"]) > 4 else "ask", ["ask", END])
    return graph.compile(checkpointer=kit.saver)
