"""What `accelerate` takes and gives, for type checkers: the classes of accelerated objects are made at run time.

Every accelerated object has a class derived from the original's very own. No annotation can say
that of every class, so these have `Any` beside the framework's base class: they stand wherever the original may, and
have whatever else it has.

What is taken is told by what it has, where a class would do as well: to who lacks a framework all of its classes are
`Any`, which everything is, objects of the other frameworks too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self, TypedDict, TypeVar

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import Runnable
from langchain_core.runnables.utils import Input, Output
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.typing import ContextT, InputT, OutputT, StateT
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.automatic_engines import Serving
from teola_plugin.adapters.plan_report import PlanReport
from teola_plugin.adapters.shadow import ShadowReport
from teola_plugin.observe.spans import Price, QueryTrace
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool

class Keywords(TypedDict, total=False):
    """Of `accelerate`, which says what they mean."""

    pool: EnginePool | None
    bind: Mapping[Any, str] | Iterable[tuple[Any, str]] | None
    passes: Iterable[Pass | str] | None
    speculate: str
    app: str | None
    shadow: float
    concurrent: Iterable[Any] | None
    strict: bool
    engines: str | None
    read_only: Iterable[Any] | None
    prompt_cache: bool
    prices: Mapping[str, Price] | None

class Accelerated:
    @property
    def original(self) -> Any: ...
    def explain(self, input: Any = None, *, details: bool = False) -> str: ...
    def report(self, input: Any = None) -> PlanReport: ...
    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None: ...

class Planned(Accelerated):
    """What is planned as a whole."""

    def plan(self, input: Any = None) -> Optimised | None: ...
    @property
    def shadow(self) -> ShadowReport: ...

Again = TypeVar("Again", bound=Accelerated)
Function = Callable[..., Any]

# ------------------------------------------------------------ LangChain and LangGraph

class AcceleratedRunnable(Planned, Runnable[Input, Output], Any):  # type: ignore[misc]
    @property
    def chain(self) -> Runnable[Input, Output]: ...
    @property
    def gains(self) -> bool: ...
    @property
    def serving(self) -> Serving | None: ...

class AcceleratedChatModel(Planned, BaseChatModel, Any): ...  # type: ignore[misc]
class AcceleratedLLM(Planned, BaseLLM, Any): ...  # type: ignore[misc]
class AcceleratedGraph(Accelerated, Pregel[StateT, ContextT, InputT, OutputT], Any): ...  # type: ignore[misc]

class BuiltGraph(Protocol[StateT, ContextT, InputT, OutputT]):
    """A compiled `StateGraph`, whatever its class, agents too."""

    builder: StateGraph[StateT, ContextT, InputT, OutputT]

class AnyGraph(Protocol):
    """A `Pregel` that was built in another way, e.g. by `@entrypoint`."""

    @property
    def trigger_to_nodes(self) -> Mapping[str, Any]: ...
    @property
    def get_state_history(self) -> Function: ...

# ------------------------------------------------------------ LlamaIndex

class OnTerms(Planned):
    """What LlamaIndex's have in common."""

    def with_request_context(
        self,
        *,
        app: str | None = None,
        tenant: str | None = None,
        deadline_s: float | None = None,
        weight: float | None = None,
    ) -> Self: ...

class AcceleratedQueryEngine(OnTerms, BaseQueryEngine, Any): ...  # type: ignore[misc]
class AcceleratedRetriever(OnTerms, BaseRetriever, Any): ...  # type: ignore[misc]
class AcceleratedSynthesizer(OnTerms, BaseSynthesizer, Any): ...  # type: ignore[misc]
class AcceleratedChatEngine(OnTerms, BaseChatEngine, Any): ...  # type: ignore[misc]
class AcceleratedWorkflow(OnTerms, Workflow, Any): ...  # type: ignore[misc]

class QueryEngine(Protocol):
    @property
    def query(self) -> Function: ...
    @property
    def aquery(self) -> Function: ...

class Retriever(Protocol):
    @property
    def retrieve(self) -> Function: ...
    @property
    def aretrieve(self) -> Function: ...

class Synthesizer(Protocol):
    @property
    def synthesize(self) -> Function: ...
    @property
    def get_response(self) -> Function: ...

class ChatEngine(Protocol):
    @property
    def stream_chat(self) -> Function: ...
    @property
    def chat_history(self) -> Any: ...

class AnyWorkflow(Protocol):
    @property
    def run(self) -> Function: ...
    @property
    def add_step(self) -> Function: ...

class Pipeline(Protocol):
    @property
    def arun(self) -> Function: ...
    @property
    def docstore_strategy(self) -> Any: ...

class Index(Protocol):
    @property
    def insert_nodes(self) -> Function: ...
    @property
    def vector_store(self) -> Any: ...

Writes = TypeVar("Writes", bound=Pipeline | Index)
