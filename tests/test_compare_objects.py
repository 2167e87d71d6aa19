"""Tests of `teola compare` with objects of every kind, pools and bindings, and with what would falsify its figures."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.openai_stub import openai_stub

from teola_plugin.cli.compare import measure
from teola_plugin.cli.compare.measure import ASYNC, CONTROL, FAST_ASYNC, FAST_SYNC, SYNC
from teola_plugin.cli.main import main

APP = '''
"""Apps of several frameworks, as users have them."""
import functools
import os
import time
from operator import add
from typing import Annotated, TypedDict

from langchain_core.globals import set_llm_cache
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import Document
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

from support.own_leaves import Chat
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import fake_engines
from teola_plugin.langchain import ChatTeola
from teola_plugin.llamaindex import TeolaLLM

# ---- LlamaIndex

index = VectorStoreIndex.from_documents(
    [Document(text=f"Lambs eat {what}.") for what in ("grass", "hay")], embed_model=MockEmbedding(embed_dim=8)
)
engine = index.as_query_engine(llm=MockLLM(max_tokens=4))
streaming = index.as_query_engine(llm=MockLLM(max_tokens=4), streaming=True)
retriever = index.as_retriever()
synthesizer = get_response_synthesizer(llm=MockLLM(max_tokens=4), response_mode="tree_summarize")
talk = SimpleChatEngine.from_defaults(llm=MockLLM())

def on_pool():
    pool = EnginePool.local(fake_engines())
    return index.as_query_engine(llm=TeolaLLM(pool=pool, max_tokens=4))

class Flow(Workflow):
    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=ev.question.upper())

agent = FunctionAgent(llm=MockFunctionCallingLLM(), tools=[])

# ---- LangGraph

class Remembered(TypedDict):
    question: str
    seen: Annotated[list, add]

def remembering():
    made = StateGraph(Remembered)
    made.add_node("see", lambda state: {"seen": [state["question"]]})
    made.add_edge(START, "see")
    return made.compile(checkpointer=InMemorySaver())

def asking():
    made = StateGraph(Remembered)
    made.add_node("see", lambda state: {"seen": [interrupt("may I?")]})
    made.add_edge(START, "see")
    return made.compile(checkpointer=InMemorySaver())

# ---- pools and bindings

def engines():
    return EnginePool.local(fake_engines())

mine = Chat()

def ask(text, model):
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()

own = ask("Rewrite {question}", mine)

def on_a_server():
    """Of this machine; its address is the test's."""
    from langchain_openai import ChatOpenAI
    return ask("Rewrite {question}", ChatOpenAI(model="m", base_url=os.environ["STUB"], api_key="k", max_retries=0))

def paired():
    pool = engines()
    model = ChatTeola(pool=pool, max_tokens=6)
    return ask("Rewrite {question}", model), {"pool": pool, "speculate": "off"}

def mistaken():
    return ask("Rewrite {question}", FakeListChatModel(responses=["a"])), {"pools": None}

fast = accelerate(paired()[0], speculate="off")

# ---- what is done once

@functools.cache
def looked_up(question):
    time.sleep(0.2)
    return question.upper()

def costly_at_first():
    return RunnableLambda(lambda given: looked_up(given["question"]))

def cached():
    """A model whose answers the app keeps."""
    set_llm_cache(InMemoryCache())
    return ask("{question}", FakeListChatModel(responses=["a", "a"], sleep=0.02))
'''


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module with a new name into the current folder, and return the name.

    Collect what it left without a warning: pools that never started, and connections of LlamaIndex's memories.
    """
    name = f"apps_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    inputs('"what do lambs eat?"')
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


def inputs(*lines: str) -> None:
    Path("in.jsonl").write_text("\n".join(lines))


def compared(capfd: pytest.CaptureFixture[str], *arguments: str, repeats: int = 1, status: int = 0) -> dict[str, Any]:
    capfd.readouterr()
    ended = main(["compare", *arguments, "--inputs", "in.jsonl", "--repeats", str(repeats), "--json"])
    captured = capfd.readouterr()
    assert ended == status, captured
    found: dict[str, Any] = json.loads(captured.out)
    return found


EVERY = [SYNC, ASYNC, CONTROL, FAST_SYNC, FAST_ASYNC]
TEXT, QUESTION = '"what do lambs eat?"', '{"question": "what do lambs eat?"}'


@pytest.mark.parametrize(
    ("name", "kind", "line", "ways"),
    [
        ("engine", "query engine", TEXT, EVERY),
        ("streaming", "query engine", TEXT, EVERY),
        ("on_pool", "query engine", TEXT, EVERY),
        ("retriever", "retriever", TEXT, EVERY),
        ("synthesizer", "synthesizer", '{"query": "what?", "nodes": ["Lambs eat grass.", "Lambs sleep."]}', EVERY),
        ("talk", "chat engine", TEXT, EVERY),
        ("Flow", "workflow", QUESTION, [ASYNC, CONTROL, FAST_ASYNC]),
        ("agent", "agent", TEXT, [ASYNC, CONTROL, FAST_ASYNC]),
        ("agent", "agent", '{"user_msg": "hello"}', [ASYNC, CONTROL, FAST_ASYNC]),
        ("remembering", "graph", '{"question": "why?", "seen": []}', EVERY),
        ("asking", "graph", '{"question": "why?", "seen": []}', EVERY),
    ],
)
def test_every_kind_of_object_is_compared(
    app: str, capfd: pytest.CaptureFixture[str], name: str, kind: str, line: str, ways: list[str]
) -> None:
    inputs(line)
    found = compared(capfd, f"{app}:{name}")
    assert found["kind"] == kind and found["errors"] == []
    assert found["equality"]["state"] == "equal", found["equality"]
    assert list(found["latency_s"]) == ways
    assert all(figures["n"] == 1 for figures in found["latency_s"].values())


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("engine", QUESTION, "line 1: no input of a query engine. Next: it takes a text"),
        ("Flow", TEXT, "no input of a workflow. Next: it takes the arguments of run()"),
        ("agent", "7", "no input of a agent"),
        ("synthesizer", TEXT, 'it takes a query and texts: {"query"'),
    ],
)
def test_inputs_of_a_wrong_kind_are_reported(
    app: str, capsys: pytest.CaptureFixture[str], name: str, line: str, message: str
) -> None:
    inputs(line)
    assert main(["compare", f"{app}:{name}", "--inputs", "in.jsonl"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# ------------------------------------------------------------ pools and bindings


def test_accelerate_arguments_of_the_module_are_used(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    inputs(QUESTION)
    assert next(iter(compared(capfd, f"{app}:paired")["where_the_time_went"])) == "llm"
    found = compared(capfd, f"{app}:fast")
    assert next(iter(found["where_the_time_went"])) == "llm", "an accelerated object is compared as it is"


@pytest.mark.parametrize("pool", ["pool.yaml", "APP:engines"])
def test_pool_and_binding_options_are_used(app: str, capfd: pytest.CaptureFixture[str], pool: str) -> None:
    """The fake engine says something else than the model: so it was asked."""
    inputs(QUESTION)
    Path("pool.yaml").write_text("engines:\n  llm:\n    kind: fake\n")
    found = compared(
        capfd, f"{app}:own", "--pool", pool.replace("APP", app), "--bind", f"{app}:mine=llm", "--no-stream", status=1
    )
    assert found["equality"]["state"] == "different" and next(iter(found["where_the_time_went"])) == "llm"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{app}:paired", "--pool", "{app}:mine"], "is a Chat, not an EnginePool"),
        (["{app}:paired", "--pool", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["{app}:paired", "--bind", "{app}:mine"], "is not of the form module:object=engine"),
        (["{app}:paired", "--bind", "{app}:lost=llm"], "has no 'lost'"),
        (["{app}:paired", "--bind", "{app}:mine=llm"], "the Chat in bind= does not occur in the chain"),
        (["{app}:mistaken"], "unknown argument of accelerate for comparing 'pools'"),
        (["{app}:fast", "--pool", "{app}:engines"], "the object is accelerated already"),
    ],
)
def test_invalid_pool_or_binding_is_reported(
    app: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["compare", *(one.format(app=app) for one in arguments), "--inputs", "in.jsonl"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Next: " in error and "Traceback" not in error


def test_report_suggests_useful_bindings(
    app: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs(QUESTION)
    with openai_stub() as stub:
        monkeypatch.setenv("STUB", stub.base_url)
        found = compared(capfd, f"{app}:on_a_server", "--no-stream")
        served = compared(capfd, f"{app}:on_a_server", "--no-stream", "--engines", "auto")
        assert main(["compare", f"{app}:on_a_server", "--inputs", "in.jsonl", "--repeats", "1", "--no-stream"]) == 0
    lines = [
        "pool = EnginePool.local({",
        f"    'llm': OpenAIServer(base_url='{stub.base_url}', model='m'),",
        "}).start()",
        "accelerate(..., pool=pool, bind=[(chat_open_ai, 'llm')])",
    ]
    assert found["bindings"] == lines and found["equality"]["state"] == "equal"
    assert served["bindings"] == [] and served["equality"]["state"] == "equal"
    assert next(iter(served["where_the_time_went"])).startswith("llm")
    stdout = capfd.readouterr().out
    assert all(line in stdout for line in lines) and "--engines auto tries it" in stdout


def test_report_suggests_no_binding_without_an_engine(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert compared(capfd, f"{app}:engine")["bindings"] == []
    inputs(QUESTION)
    assert compared(capfd, f"{app}:own", "--no-stream")["bindings"] == []


# ------------------------------------------------------------ what would spoil the figures


def test_one_time_costs_are_paid_before_the_timed_runs(
    app: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version printed a ratio of 2 and more here.

    The first call of each input takes 200 ms, the others none.
    """
    inputs(*(f'{{"question": "{i}"}}' for i in range(4)))
    before, as_ever = list[int](), measure.warm_up

    def warm_up(*given: Any) -> None:
        as_ever(*given)
        before.append(sys.modules[app].looked_up.cache_info().misses)

    monkeypatch.setattr(measure, "warm_up", warm_up)
    found = compared(capfd, f"{app}:costly_at_first", "--no-stream")
    assert before == [4] and sys.modules[app].looked_up.cache_info().misses == 4, "none in a call that is counted"
    assert found["speedup"]["verdict"] == "cannot tell"


def test_response_cache_of_the_app_is_cleared_between_runs(app: str, capfd: pytest.CaptureFixture[str]) -> None:
    from langchain_core.globals import get_llm_cache, set_llm_cache

    inputs(QUESTION)
    try:
        found = compared(capfd, f"{app}:cached", "--no-stream", repeats=2)
        kept: Any = get_llm_cache()
        assert kept is not None and not kept._cache, "the app's own cache is as it was"
    finally:
        set_llm_cache(None)
    assert min(figures["min"] for figures in found["latency_s"].values()) >= 0.02


# ------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "a:b", "--inputs", "x", "--repeats", "0"],
        ["compare", "a:b", "--inputs", "x", "--repeats", "two"],
        ["compare", "a:b", "--inputs", "x", "--limit", "-1"],
        ["compare", "a:b", "--inputs", "x", "--speculate", "much"],
        ["compare", "a:b"],
        ["scale", "llm", "many"],
        ["nothing"],
        [],
    ],
)
def test_invalid_arguments_are_reported_in_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1 and error.startswith("teola: ") and "Next: teola" in error and "_count" not in error


@pytest.mark.parametrize("command", ["doctor --quick", "compare APP:paired", "compare APP:paired --json", "--help"])
def test_closed_stdout_ends_the_command_without_traceback(app: str, command: str) -> None:
    """`teola ... | head -1`: no traceback, and no status that means something else."""
    inputs(QUESTION)
    more = ["--inputs", "in.jsonl", "--repeats", "1", "--no-stream"] if command.startswith("compare") else []
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "teola_plugin.cli.main", *command.replace("APP", app).split(), *more],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    os.close(writer)
    announced = ["teola: the app runs "] if command.startswith("compare") else []
    lines = ran.stderr.splitlines()
    assert len(lines) == len(announced) and all(map(str.startswith, lines, announced))
    assert ran.returncode == (0 if command == "--help" else 141)
