"""Code that type checkers must refuse: each marked line, for the reason that stands there, and no other line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph.state import CompiledStateGraph
from llama_index.core import VectorStoreIndex

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import OpenAIServer, VllmEngine
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore, tool_engine
from teola_plugin.llamaindex import TeolaLLM
from teola_plugin.server.client import TeolaClient
from teola_plugin.workflow import (
    Component,
    Deployment,
    Function,
    Generation,
    Searching,
    Synthesis,
    Workflow,
    on_engine,
    reads,
    setting,
)


class State(TypedDict):
    question: str


def langchain(pool: EnginePool) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | ChatTeola(pool=pool) | StrOutputParser()
    accelerate("a chain")  # refused: call-overload
    accelerate(chain, pol=pool)  # refused: call-overload
    accelerate(chain, pool="pool.yaml")  # refused: call-overload
    accelerate(chain, bind=[chain])  # refused: list-item
    accelerate(chain, shadow="often")  # refused: call-overload
    fast = accelerate(chain)
    print(fast.invoke({"question": "?"}).answer)  # refused: attr-defined
    print(fast.last_trace().seconds)  # refused: union-attr
    ChatTeola()  # refused: call-arg
    ChatTeola(pool="pool.yaml")  # refused: arg-type
    ChatTeola(pool=pool, max_token=8)  # refused: call-arg
    ChatTeola(pool=pool, max_tokens="8")  # refused: arg-type
    TeolaVectorStore(pool=pool, embedding="embedder")  # refused: arg-type
    tool_engine([TeolaEmbeddings(pool=pool)])  # refused: list-item


def graphs_and_llamaindex(pool: EnginePool, graph: CompiledStateGraph[State], index: VectorStoreIndex) -> None:
    accelerate(graph).explain(detail=True)  # refused: call-arg
    accelerate(graph).invoke(5)  # refused: call-overload
    engine = accelerate(index.as_query_engine())
    engine.explain(detail=True)  # refused: call-arg
    engine.with_request_context(deadline="soon")  # refused: call-arg
    TeolaLLM(pool=5)  # refused: arg-type


def pools() -> None:
    EnginePool.local({"llm": 5})  # refused: dict-item
    EnginePool.local(FakeLLM("llm"))  # refused: arg-type
    EnginePool.local(["llm"])  # refused: list-item
    EnginePool.local(model="a/model")  # refused: call-arg
    EnginePool.from_yaml()  # refused: call-arg
    EnginePool.connect(8000)  # refused: arg-type
    VllmEngine("llm")  # refused: call-arg
    OpenAIServer("http://localhost:8000/v1")  # refused: call-arg
    TeolaClient("http://localhost:8080").submit()  # refused: call-arg


def workflows(app: Deployment, pool: EnginePool) -> None:
    Generation("answer", 5)  # refused: arg-type
    Generation("answer", "{question}", "llm")  # refused: call-arg
    Generation("answer", promt="{question}")  # refused: call-arg
    Generation("answer", stop="\n")  # refused: arg-type
    Searching("found", "question")  # refused: call-arg
    Synthesis("answer", max_tokens="8")  # refused: arg-type
    Function("f", "no function")  # refused: arg-type
    Generation("a") >> "b"  # refused: operator
    Generation("a") >> [Generation("b"), len]  # refused: list-item
    Workflow("w", "a >> b")  # refused: arg-type
    Workflow("w", Generation("a")).deploy("pool")  # refused: arg-type
    app.run("What do lambs eat?")  # refused: arg-type
    app.run({"question": "?"}, deadline=5.0)  # refused: call-arg
    app.stream({"question": "?"}, tenant=7)  # refused: arg-type
    print(app.run({"question": "?"}).answr)  # refused: attr-defined
    print(app.last_trace().seconds)  # refused: union-attr


@dataclass(frozen=True)
class Nearest(Component):
    question: int = reads("question")  # refused: assignment
    store: float = on_engine("store")  # refused: assignment
    k: int = setting("two")  # refused: assignment


Nearest("found", kk=3)  # refused: call-arg
