"""Tests of accelerated LlamaIndex objects of every kind: class, members, state, copies and pickles."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks import CallbackManager
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.extractors import TitleExtractor
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import MockFunctionCallingLLM, MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.playground.base import DEFAULT_MODES
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    CitationQueryEngine,
    CustomQueryEngine,
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import (
    AutoMergingRetriever,
    QueryFusionRetriever,
    RouterRetriever,
    VectorIndexRetriever,
)
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode, TransformComponent
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.storage import StorageContext
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from support.llamaindex_engines import own_loop
from workflows.plugins.basic import BasicRuntime

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

QUESTION = "what sails"


@pytest.fixture(autouse=True)
def mock_models() -> Iterator[None]:
    before = Settings._llm, Settings._embed_model, Settings._callback_manager
    Settings.llm, Settings.embed_model = MockLLM(max_tokens=4), MockEmbedding(embed_dim=4)
    with own_loop():
        yield
    Settings._llm, Settings._embed_model, Settings._callback_manager = before


# ------------------------------------------------------------ objects of every kind


class OwnEngine(BaseQueryEngine):
    """An engine with a property, a class attribute, slots, and counted calls."""

    label = "own"
    __slots__ = ("notes",)

    def __init__(self, prefix: str = ">") -> None:
        super().__init__(callback_manager=CallbackManager([]))
        self._prefix = prefix
        self.calls = 0
        self.notes: list[str] = []

    @property
    def prefix(self) -> str:
        """What answers begin with."""
        return self._prefix

    @prefix.setter
    def prefix(self, value: str) -> None:
        self._prefix = value

    def _query(self, query_bundle: QueryBundle) -> Response:
        self.calls += 1
        self.notes.append(query_bundle.query_str)
        return Response(f"{self._prefix}{query_bundle.query_str}")

    async def _aquery(self, query_bundle: QueryBundle) -> Response:
        return self._query(query_bundle)

    def _get_prompt_modules(self) -> dict[str, Any]:
        return {}


class OverridingEngine(RetrieverQueryEngine):
    """An engine whose entry point takes more, with attributes under the names of ours."""

    report = "mine"

    def query(self, str_or_query_bundle: Any, shout: bool = False) -> Any:
        """Answer, loudly if `shout`."""
        answer = str(super().query(str_or_query_bundle))
        return Response(answer.upper() if shout else answer)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        vars(self).setdefault("set_names", []).append(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("made_up_"):
            return name.removeprefix("made_up_")
        raise AttributeError(name)


class OwnPydanticEngine(CustomQueryEngine):
    """An engine with fields, one under the name of ours."""

    greeting: str = "hello"
    plan: str

    def custom_query(self, query_str: str) -> str:
        return f"{self.greeting}, {self.plan}: {query_str}"


class OwnRetriever(BaseRetriever):
    def __init__(self, text: str = "boat") -> None:
        super().__init__()
        self.text = text

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_="own", text=self.text), score=1.0)]


class OwnSynthesizer(BaseSynthesizer):
    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: dict[str, Any]) -> None: ...

    def get_response(self, query_str: str, text_chunks: Any, **response_kwargs: Any) -> str:
        return f"{query_str}: {len(text_chunks)}"

    async def aget_response(self, query_str: str, text_chunks: Any, **response_kwargs: Any) -> str:
        return self.get_response(query_str, text_chunks)


class OwnChatEngine(SimpleChatEngine):
    mood = "calm"


class OwnFlow(Workflow):
    def __init__(self, word: str = "done", **options: Any) -> None:
        super().__init__(**options)
        self.word = word

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=self.word)


class OuterFlow(Workflow):
    def __init__(self, inner: Workflow) -> None:
        super().__init__()
        self.inner = inner

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=f"outer {await self.inner.run()}")


class OwnAgent(FunctionAgent):
    mood: str = "calm"


class OwnPipeline(IngestionPipeline):
    runs: int = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return super().run(*args, **kwargs)


class OwnIndex(VectorStoreIndex):
    label = "own"


def nodes() -> list[TextNode]:
    return [TextNode(id_=f"n{i}", text=text) for i, text in enumerate(("boats sail", "oats grow", "ropes hold"))]


def index(kind: type[VectorStoreIndex] = VectorStoreIndex) -> VectorStoreIndex:
    return kind(nodes(), embed_model=MockEmbedding(embed_dim=4))


def retriever() -> Any:
    return index().as_retriever(similarity_top_k=2)


def rag() -> Any:
    return RetrieverQueryEngine.from_args(retriever(), llm=MockLLM(max_tokens=4))


def fusion() -> Any:
    return QueryFusionRetriever([retriever(), retriever()], num_queries=1, llm=MockLLM(), use_async=False)


def tools(engine: Any = None) -> list[QueryEngineTool]:
    return [QueryEngineTool.from_defaults(engine or rag(), name=name, description=name) for name in ("farm", "port")]


def router(engine: Any = None) -> Any:
    return RouterQueryEngine(
        LLMSingleSelector.from_defaults(llm=ChoosingLLM(max_tokens=None)), tools(engine), llm=MockLLM()
    )


def sub_questions(engine: Any = None) -> Any:
    return SubQuestionQueryEngine(
        LLMQuestionGenerator.from_defaults(llm=AskingLLM(max_tokens=None)),
        get_response_synthesizer(llm=MockLLM(max_tokens=4)),
        tools(engine),
        verbose=False,
        use_async=False,
    )


class ChoosingLLM(MockLLM):
    def complete(self, *args: Any, **kwargs: Any) -> Any:
        response = super().complete(*args, **kwargs)
        response.text = '[{"choice": 1, "reason": "a"}]'
        return response


class AskingLLM(MockLLM):
    def complete(self, *args: Any, **kwargs: Any) -> Any:
        response = super().complete(*args, **kwargs)
        response.text = '{"items": [{"sub_question": "what grows", "tool_name": "farm"}]}'
        return response


def merging(base: Any = None) -> Any:
    return AutoMergingRetriever(base or retriever(), StorageContext.from_defaults())


def synthesizer(mode: ResponseMode) -> Callable[[], Any]:
    return lambda: get_response_synthesizer(response_mode=mode, llm=MockLLM(max_tokens=4))


def own_pipeline(*transformations: Any) -> Any:
    return OwnPipeline(transformations=list(transformations))  # type: ignore[call-arg]


def chat(kind: Any, part: Any = None) -> Any:
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    return kind.from_defaults(*([] if part is None else [part]), llm=MockLLM(max_tokens=4), memory=memory)


def function_agent(kind: Any = FunctionAgent) -> Any:
    return kind(name="a", description="a", llm=MockFunctionCallingLLM(), tools=[])


OBJECTS: dict[str, Callable[[], Any]] = {
    "rag": rag,
    "router": router,
    "sub-questions": sub_questions,
    "multi-step": lambda: MultiStepQueryEngine(rag(), StepDecomposeQueryTransform(MockLLM()), num_steps=1),
    "citation": lambda: CitationQueryEngine.from_args(index(), llm=MockLLM(max_tokens=4)),
    "transform": lambda: TransformQueryEngine(rag(), HyDEQueryTransform(MockLLM(max_tokens=4))),
    "retry": lambda: RetryQueryEngine(rag(), RelevancyEvaluator(llm=MockLLM(max_tokens=4))),
    "own engine": OwnEngine,
    "overriding engine": lambda: OverridingEngine.from_args(retriever(), llm=MockLLM(max_tokens=4)),
    "own pydantic engine": lambda: OwnPydanticEngine(plan="mine"),
    "retriever": retriever,
    "fusion": fusion,
    "auto-merging": merging,
    "router retriever": lambda: RouterRetriever(
        LLMSingleSelector.from_defaults(llm=ChoosingLLM(max_tokens=None)),
        [RetrieverTool.from_defaults(retriever(), description="a")],
    ),
    "own retriever": OwnRetriever,
    **{f"synthesizer {mode.value}": synthesizer(mode) for mode in ResponseMode},
    "own synthesizer": lambda: OwnSynthesizer(llm=MockLLM()),
    "context chat": lambda: chat(ContextChatEngine, retriever()),
    "condense plus context chat": lambda: chat(CondensePlusContextChatEngine, retriever()),
    "condense question chat": lambda: chat(CondenseQuestionChatEngine, rag()),
    "simple chat": lambda: chat(SimpleChatEngine),
    "own chat": lambda: chat(OwnChatEngine),
    "function agent": function_agent,
    "own agent": lambda: function_agent(OwnAgent),
    "react agent": lambda: ReActAgent(name="a", description="a", llm=MockLLM(), tools=[]),
    "agent workflow": lambda: AgentWorkflow(agents=[function_agent()]),
    "own workflow": OwnFlow,
    "pipeline": lambda: IngestionPipeline(transformations=[MockEmbedding(embed_dim=4)]),
    "own pipeline": lambda: own_pipeline(MockEmbedding(embed_dim=4)),
    "index": index,
    "own index": lambda: index(OwnIndex),
}
ENTRIES = (
    *("query", "aquery", "retrieve", "aretrieve", "synthesize", "asynthesize", "get_response", "aget_response"),
    *("chat", "achat", "stream_chat", "astream_chat", "run", "arun", "as_retriever", "as_query_engine"),
)
every_object = pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS.keys())


def answer(obj: Any) -> Any:
    """Return what the object says, as plain data."""
    if isinstance(obj, BaseQueryEngine):
        return str(obj.query(QUESTION))
    if isinstance(obj, BaseRetriever):
        return [(found.node_id, found.text) for found in obj.retrieve(QUESTION)]
    if isinstance(obj, BaseSynthesizer):
        return str(obj.synthesize(QUESTION, [NodeWithScore(node=node) for node in nodes()]))
    if isinstance(obj, IngestionPipeline):
        return [node.embedding for node in obj.run(nodes=nodes())]
    if isinstance(obj, VectorStoreIndex):
        return [found.node_id for found in obj.as_retriever().retrieve(QUESTION)]
    if isinstance(obj, OwnFlow):
        return asyncio.run(result_of(obj))
    return str(obj.chat(QUESTION)) if hasattr(obj, "chat") else sorted(vars(obj))


async def result_of(workflow: Workflow, **given: Any) -> Any:
    return await workflow.run(**given)


def outcome(act: Callable[[], Any]) -> Any:
    """Return what a function gives, or the class of what it raises."""
    try:
        return act()
    except Exception as error:
        return type(error)


# ------------------------------------------------------------ class and members


@every_object
def test_accelerated_object_has_the_originals_class(make: Callable[[], Any]) -> None:
    original = make()
    fast = accelerate(original)
    assert isinstance(fast, type(original))
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(fast), name) == getattr(type(original), name)
    assert fast.original is original
    assert accelerate(fast).original is original
    assert accelerate(fast) is not fast


@every_object
def test_accelerated_object_has_the_originals_members(make: Callable[[], Any]) -> None:
    original = make()
    fast = accelerate(original)
    assert set(dir(original)) <= set(dir(fast))
    assert vars(fast) is vars(original)
    for name in {name for name in dir(original) if name in ENTRIES}:
        own, ours = getattr(original, name), getattr(fast, name)
        assert inspect.signature(ours) == inspect.signature(own)
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(own)
        assert (ours.__name__, ours.__qualname__, ours.__doc__) == (own.__name__, own.__qualname__, own.__doc__)
    assert not [name for name in ENTRIES if hasattr(fast, name) and not hasattr(original, name)]


@every_object
def test_accelerated_object_gives_the_originals_answers(make: Callable[[], Any]) -> None:
    assert outcome(lambda: answer(accelerate(make()))) == outcome(lambda: answer(make()))


@every_object
def test_fields_are_set_on_original_and_accelerated_object(make: Callable[[], Any]) -> None:
    original = make()
    fast = accelerate(original)
    for name, value in list(vars(original).items()):
        setattr(fast, name, value)
        assert getattr(original, name) is value
    if not hasattr(type(original), "model_fields"):
        fast.extra_field = marker = object()
        assert original.extra_field is marker
        original.extra_field = None
        assert fast.extra_field is None
        del fast.extra_field
        assert not hasattr(original, "extra_field")


@every_object
def test_wrong_arguments_raise_the_originals_error(make: Callable[[], Any]) -> None:
    original = make()
    fast = accelerate(original)
    for name in ("query", "retrieve", "synthesize", "get_response"):
        if not hasattr(original, name):
            continue
        errors = []
        for obj in (original, fast):
            with pytest.raises(TypeError) as caught:
                getattr(obj, name)(unknown_argument=1)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


@every_object
def test_updating_prompts_has_the_originals_effect(make: Callable[[], Any]) -> None:
    original, fast = make(), accelerate(make())
    if not hasattr(original, "get_prompts"):
        pytest.skip("it has no prompts")

    def updated(obj: Any) -> Any:
        prompts = {name: PromptTemplate(f"{{context_str}} {{query_str}} {name}") for name in obj.get_prompts()}
        obj.update_prompts(prompts)
        return {name: getattr(prompt, "template", "") for name, prompt in obj.get_prompts().items()}

    assert outcome(lambda: updated(fast)) == outcome(lambda: updated(original))
    assert fast.get_prompts().keys() == fast.original.get_prompts().keys()


# ------------------------------------------------------------ copies


@every_object
@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "model_copy", "deep model_copy"])
def test_copy_works_if_a_copy_of_the_original_works(make: Callable[[], Any], way: str) -> None:
    ways: dict[str, Callable[[Any], Any]] = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
        "model_copy": lambda obj: obj.model_copy(),
        "deep model_copy": lambda obj: obj.model_copy(deep=True),
    }
    original = make()
    fast = accelerate(original)
    copied = outcome(lambda: ways[way](original))
    fast_copy = outcome(lambda: ways[way](fast))
    if isinstance(copied, type):
        assert fast_copy is copied
        return
    assert type(fast_copy.original) is type(original)
    assert fast_copy.original is not original
    assert sorted(vars(fast_copy)) == sorted(vars(copied))
    shared = {name for name, value in vars(copied).items() if value is vars(original)[name]}
    assert shared == {name for name, value in vars(fast_copy).items() if value is vars(original)[name]}
    assert outcome(lambda: answer(fast_copy)) == outcome(lambda: answer(copied))


def test_copy_has_own_state_and_keeps_options() -> None:
    original = OwnEngine()
    fast = accelerate(original, app="mine")
    copied = copy.copy(fast.with_request_context(tenant="t"))
    copied.prefix = "copy: "
    assert str(fast.query("q")) == ">q"
    assert str(copied.query("q")) == "copy: q"
    assert copied.__teola_session__.settings.app == "mine"
    assert copied.__teola_session__.settings.tenant == "t"


def test_model_copy_update_changes_only_the_copy() -> None:
    pipeline = accelerate(IngestionPipeline(transformations=[MockEmbedding(embed_dim=4)]))
    copied = pipeline.model_copy(update={"transformations": [MockEmbedding(embed_dim=2)]})
    assert [len(vector) for vector in answer(copied)] == [2, 2, 2]
    assert [len(vector) for vector in answer(pipeline)] == [4, 4, 4]


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local({"llm": FakeLLM(), "embedder": FakeEmbedder()}) as made:
        yield made


@pytest.mark.parametrize(
    "make",
    [rag, index, retriever, OBJECTS["pipeline"], OwnFlow],
    ids=["engine", "index", "retriever", "pipeline", "flow"],
)
def test_pickling_an_object_with_a_pool_raises(pool: EnginePool, make: Callable[[], Any]) -> None:
    fast = accelerate(make(), pool=pool)
    with pytest.raises(RegistrationError, match="cannot be pickled: its engines live in this process"):
        pickle.dumps(fast)
    assert copy.deepcopy(fast).original is not fast.original


# ------------------------------------------------------------ served copies are renewed


def engine_calls(fast: Any) -> int:
    trace = fast.last_trace()
    return 0 if trace is None else len([span for span in trace.spans if span.engine == "llm"])


def test_copies_keep_the_bound_model(pool: EnginePool) -> None:
    own = MockLLM(max_tokens=4)
    engine = RetrieverQueryEngine.from_args(retriever(), llm=own)
    fast = accelerate(engine, pool=pool, bind=[(own, "llm")])
    for copied in (copy.copy(fast), copy.deepcopy(fast)):
        assert str(copied.query(QUESTION)) == str(fast.query(QUESTION)) != str(engine.query(QUESTION))
        assert engine_calls(copied) == 1


def test_replaced_parts_apply_to_calls_with_bound_models(pool: EnginePool) -> None:
    own = MockLLM(max_tokens=4)
    engine = RetrieverQueryEngine.from_args(retriever(), llm=own)
    fast = accelerate(engine, pool=pool, bind=[(own, "llm")])
    assert len(fast.query(QUESTION).source_nodes) == 2
    engine._retriever = OwnRetriever("rope")
    assert [found.text for found in fast.query(QUESTION).source_nodes] == ["rope"]
    fast.retriever.text = "mast"
    assert [found.text for found in fast.query(QUESTION).source_nodes] == ["mast"]
    assert engine_calls(fast) == 1
    engine._response_synthesizer = get_response_synthesizer(llm=MockLLM(max_tokens=2))
    assert str(fast.query(QUESTION)) == "text text"
    engine._response_synthesizer = get_response_synthesizer(llm=own)
    assert str(fast.query(QUESTION)) != "text text"
    assert engine_calls(fast) == 1


def test_list_changed_in_place_applies_to_calls_with_bound_models(pool: EnginePool) -> None:
    own = MockLLM(max_tokens=4)
    inner = QueryFusionRetriever([OwnRetriever("a")], num_queries=1, llm=own, use_async=False)  # type: ignore[list-item]
    fast = accelerate(RetrieverQueryEngine.from_args(inner, llm=own), pool=pool, bind=[(own, "llm")])
    assert len(fast.query(QUESTION).source_nodes) == 1
    inner._retrievers.append(VectorIndexRetriever(index(), similarity_top_k=1))  # type: ignore[arg-type]
    assert len(fast.query(QUESTION).source_nodes) == 2


def test_request_context_is_kept_when_a_part_is_replaced(pool: EnginePool) -> None:
    own = MockLLM(max_tokens=4)
    engine = RetrieverQueryEngine.from_args(retriever(), llm=own)
    fast = accelerate(engine, pool=pool, bind=[(own, "llm")]).with_request_context(app="mine")
    engine._retriever = OwnRetriever("rope")
    fast.query(QUESTION)
    trace = fast.last_trace()
    assert trace is not None
    assert trace.app == "mine"


class CountingEngine(RetrieverQueryEngine):
    """An engine with state, which calls change."""

    count = 0

    def _query(self, query_bundle: QueryBundle) -> Any:
        self.count += 1
        return super()._query(query_bundle)


def test_state_changed_by_a_call_is_the_originals(pool: EnginePool) -> None:
    own = MockLLM(max_tokens=4)
    engine = CountingEngine.from_args(retriever(), llm=own)
    fast = accelerate(engine, pool=pool, bind=[(own, "llm")])
    for _ in range(3):
        fast.query(QUESTION)
    assert engine_calls(fast) == 1
    assert engine.count == fast.count == 3  # type: ignore[attr-defined]
    copied = copy.copy(fast)
    copied.query(QUESTION)
    assert (copied.count, engine.count) == (4, 3)  # type: ignore[attr-defined]


class SpeakingFlow(Workflow):
    def __init__(self, llm: Any) -> None:
        super().__init__()
        self.llm, self.runs = llm, 0

    @step
    async def speak(self, ev: StartEvent) -> StopEvent:
        self.runs += 1
        return StopEvent(result=str(await self.llm.acomplete(QUESTION)))


def test_workflow_with_bound_llm_keeps_its_state(pool: EnginePool) -> None:
    own = MockLLM(max_tokens=2)
    flow = SpeakingFlow(own)
    fast = accelerate(flow, pool=pool, bind=[(own, "llm")])
    assert asyncio.run(result_of(fast)) != "text text"
    assert flow.runs == 1
    fast.llm = MockLLM(max_tokens=3)
    assert asyncio.run(result_of(fast)) == "text text text"
    assert asyncio.run(result_of(flow)) == "text text text"
    assert fast.runs == 3


# ------------------------------------------------------------ pipelines and indexes


def test_replaced_transformations_apply_to_the_next_run() -> None:
    own = MockEmbedding(embed_dim=4)
    pipeline = IngestionPipeline(transformations=[own])
    fast = accelerate(pipeline, concurrent=[own])
    assert fast.transformations == [own] and fast.transformations[0] is own
    pipeline.transformations = [MockEmbedding(embed_dim=3)]
    assert [len(vector) for vector in answer(fast)] == [3, 3, 3]
    fast.transformations[:] = [MockEmbedding(embed_dim=2)]
    assert [len(vector) for vector in answer(pipeline)] == [2, 2, 2]


def test_changed_fields_of_transformations_apply_to_the_next_run() -> None:
    extractor = TitleExtractor(llm=MockLLM(max_tokens=2), nodes=1)
    fast = accelerate(IngestionPipeline(transformations=[extractor], disable_cache=True))

    def titles() -> list[Any]:
        return [node.metadata["document_title"] for node in fast.run(nodes=nodes())]

    before = titles()
    extractor.llm = MockLLM(max_tokens=3)
    assert titles() != before


def test_pipeline_with_bound_embedding_follows_its_original(pool: EnginePool) -> None:
    own = MockEmbedding(embed_dim=4)
    pipeline = own_pipeline(own)
    pipeline.disable_cache = True
    fast = accelerate(pipeline, pool=pool, bind=[(own, "embedder")])
    assert {len(vector) for vector in answer(fast)} == {32}
    pipeline.transformations = [MockEmbedding(embed_dim=3)]
    assert {len(vector) for vector in answer(fast)} == {3}
    fast.transformations = [own]
    assert {len(vector) for vector in answer(fast)} == {32}
    assert {len(vector) for vector in answer(pipeline)} == {4}
    assert fast.runs == pipeline.runs == 4


def test_pipeline_with_bound_embedding_shares_the_originals_cache(pool: EnginePool) -> None:
    own = MockEmbedding(embed_dim=4)
    pipeline = own_pipeline(own)
    fast = accelerate(pipeline, pool=pool, bind=[(own, "embedder")])
    by_engine = answer(fast)
    assert answer(pipeline) == by_engine


def test_replaced_embedding_model_applies_to_index_inserts(pool: EnginePool) -> None:
    own = MockEmbedding(embed_dim=4)
    plain = VectorStoreIndex([], embed_model=own)
    fast = accelerate(plain, pool=pool, bind=[(own, "embedder")])
    vectors = plain.vector_store.data.embedding_dict  # type: ignore[attr-defined]
    fast.insert_nodes([TextNode(id_="a", text="a")])
    plain._embed_model = MockEmbedding(embed_dim=2)
    fast.insert_nodes([TextNode(id_="b", text="b")])
    fast._embed_model = own
    asyncio.run(fast.ainsert_nodes([TextNode(id_="c", text="c")]))
    assert [len(vectors[name]) for name in "abc"] == [32, 2, 32]
    assert sorted(plain.index_struct.nodes_dict) == ["a", "b", "c"]
    fast.delete_nodes(["b"])
    assert [found.node_id for found in fast.as_retriever(similarity_top_k=1).retrieve("c")] == ["c"]


def test_engines_created_by_an_accelerated_index_work() -> None:
    plain = index()
    fast = accelerate(plain)
    llm = MockLLM(max_tokens=4)
    assert str(fast.as_query_engine(llm=llm).query(QUESTION)) == str(plain.as_query_engine(llm=llm).query(QUESTION))
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    chats = [obj.as_chat_engine(ChatMode.CONTEXT, llm=llm, memory=memory) for obj in (fast, plain)]
    assert str(chats[0].chat(QUESTION)) == str(chats[1].chat(QUESTION))
    assert type(fast).from_documents([], embed_model=MockEmbedding(embed_dim=4)).as_retriever() is not None


def test_class_of_accelerated_index_matches_the_original_in_dicts() -> None:
    fast = accelerate(index())
    assert type(fast) in DEFAULT_MODES
    assert {type(fast): 1}[VectorStoreIndex] == 1
    assert type(fast) not in {OwnIndex}
    assert isinstance(fast, type(fast))


# ------------------------------------------------------------ parts of other objects


COMPOSITES: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "router": lambda fast: router(fast(rag())),
    "sub-questions": lambda fast: sub_questions(fast(rag())),
    "retriever engine": lambda fast: RetrieverQueryEngine(
        fast(retriever()), fast(get_response_synthesizer(llm=MockLLM(max_tokens=4)))
    ),
    "fusion": lambda fast: QueryFusionRetriever(
        [fast(retriever()), fast(OwnRetriever())], llm=MockLLM(), num_queries=1
    ),
    "auto-merging": lambda fast: merging(fast(retriever())),
    "condense question": lambda fast: chat(CondenseQuestionChatEngine, fast(rag())),
    "context": lambda fast: chat(ContextChatEngine, fast(retriever())),
    "retry": lambda fast: RetryQueryEngine(fast(rag()), RelevancyEvaluator(llm=MockLLM(max_tokens=4))),
    "transform": lambda fast: TransformQueryEngine(fast(rag()), HyDEQueryTransform(MockLLM(max_tokens=4))),
    "engine of an index": lambda fast: fast(index()).as_query_engine(llm=MockLLM(max_tokens=4)),
    "retriever over an index": lambda fast: VectorIndexRetriever(fast(index()), similarity_top_k=1),
}


@pytest.mark.parametrize("make", COMPOSITES.values(), ids=COMPOSITES.keys())
@pytest.mark.parametrize("outside", [lambda obj: obj, accelerate], ids=["plain", "accelerated"])
def test_accelerated_object_works_inside_other_objects(make: Any, outside: Callable[[Any], Any]) -> None:
    assert answer(outside(make(accelerate))) == answer(make(lambda part: part))


def test_accelerated_workflow_works_inside_a_workflow() -> None:
    assert asyncio.run(result_of(OuterFlow(accelerate(OwnFlow("inner"))))) == "outer inner"
    assert asyncio.run(result_of(accelerate(OuterFlow(accelerate(OwnFlow("inner")))))) == "outer inner"


def test_switched_runtime_applies_to_the_original() -> None:
    first, second = BasicRuntime(), BasicRuntime()
    flow = OwnFlow(runtime=first)
    fast = accelerate(flow)
    fast._switch_runtime(second)
    assert fast.runtime is flow.runtime
    assert flow in second._pending
    assert flow not in first._pending
    assert asyncio.run(result_of(fast)) == "done"


def test_accelerated_agent_works_in_a_team() -> None:
    agent = accelerate(function_agent())
    team = AgentWorkflow(agents=[agent], root_agent="a")
    assert team.agents["a"] is agent
    result = asyncio.run(result_of(team, user_msg="hi"))
    assert str(result) == str(asyncio.run(result_of(AgentWorkflow(agents=[function_agent()]), user_msg="hi")))


class Runs(TransformComponent):
    """A transformation that runs another pipeline."""

    inner: IngestionPipeline

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return self.inner.run(nodes=nodes)


def test_pydantic_validation_accepts_accelerated_objects() -> None:
    fast = accelerate(IngestionPipeline(transformations=[MockEmbedding(embed_dim=4)]))
    transformation = Runs(inner=fast)
    assert transformation.inner is fast
    outer = IngestionPipeline(transformations=[transformation], disable_cache=True)
    assert answer(outer) == answer(fast)
    agent = function_agent()
    assert type(agent).model_validate(accelerate(agent)).name == "a"


# ------------------------------------------------------------ classes of the user's own


def test_members_of_a_user_class_are_shared_with_the_original() -> None:
    engine = OwnEngine()
    fast = accelerate(engine)
    fast.prefix = "# "
    assert str(engine.query("q")) == str(fast.query("q")) == "# q"
    assert fast.notes is engine.notes == ["q", "q"]
    fast.notes = []
    assert engine.notes == []
    assert (fast.calls, fast.label) == (2, "own")
    del fast.notes
    with pytest.raises(AttributeError):
        _ = engine.notes


def test_overridden_entry_points_and_attribute_hooks_are_kept() -> None:
    engine = OverridingEngine.from_args(retriever(), llm=MockLLM(max_tokens=2))
    fast: Any = accelerate(engine)
    assert str(fast.query(QUESTION, shout=True)) == "TEXT TEXT"
    assert fast.report == "mine"
    assert fast.made_up_word == "word"
    fast.new_name = 1
    assert engine.set_names[-1] == "new_name"  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="unknown"):
        _ = fast.unknown


def test_fields_of_a_user_class_hide_added_methods() -> None:
    engine = OwnPydanticEngine(plan="mine")
    fast: Any = accelerate(engine)
    fast.plan = "yours"
    assert str(engine.query("q")) == str(fast.query("q")) == "hello, yours: q"
    assert type(fast)(plan="new").plan == "new"
    with pytest.raises(ValueError, match="plan"):
        type(fast)()


class Failing(OwnEngine):
    @property
    def broken(self) -> str:
        raise AttributeError("it is broken inside")


def test_error_in_a_property_is_the_originals() -> None:
    with pytest.raises(AttributeError, match="it is broken inside"):
        _ = accelerate(Failing()).broken


def test_new_instance_of_an_accelerated_class_behaves_as_originals() -> None:
    made = type(accelerate(rag())).from_args(retriever(), llm=MockLLM(max_tokens=2))
    assert str(made.query(QUESTION)) == str(asyncio.run(made.aquery(QUESTION))) == "text text"
    assert type(made)._query is not RetrieverQueryEngine._query
    assert type(pickle.loads(pickle.dumps(made))) is RetrieverQueryEngine
    assert str(copy.deepcopy(made).query(QUESTION)) == str(copy.copy(made).query(QUESTION)) == "text text"
    assert accelerate(made).original is made
    assert str(accelerate(made).query(QUESTION)) == "text text"
    kind: Any = type(accelerate(OwnEngine()))
    own = kind("! ")
    assert (str(own.query("q")), own.notes) == ("! q", ["q"])
    assert pickle.loads(pickle.dumps(own)).prefix == "! "
    kind = type(accelerate(OwnFlow()))
    assert asyncio.run(result_of(kind("new"))) == "new"
    with pytest.raises(AttributeError, match="was made by its class"):
        made.explain()


def test_accelerated_engine_sends_the_originals_callbacks_and_events() -> None:
    def recordings(make: Callable[[Any], Any]) -> Any:
        recorder = Recorder()
        engine = make(rag())
        engine.callback_manager = engine._response_synthesizer.callback_manager = CallbackManager([recorder])
        with recorded(recorder):
            engine.query(QUESTION)
            asyncio.run(engine.aquery(QUESTION))
        return recorder.callbacks, recorder.events, recorder.spans

    assert recordings(accelerate) == recordings(lambda engine: engine)


def test_nodes_of_accelerated_retriever_return_their_content() -> None:
    [found, *_] = accelerate(retriever()).retrieve(QUESTION)
    assert found.node.get_content(metadata_mode=MetadataMode.NONE) in {node.text for node in nodes()}


def test_method_patched_on_an_accelerated_engine_is_called_once() -> None:
    original = RetrieverQueryEngine.from_args(retriever(), llm=MockLLM(max_tokens=4))
    fast = accelerate(original)
    expected = str(original.query("question"))
    with mock.patch.object(fast, "query", wraps=fast.query) as spy:
        assert str(fast.query("question")) == expected
        assert spy.call_count == 1
    assert str(fast.query("question")) == expected
