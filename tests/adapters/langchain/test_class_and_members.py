"""Tests that an accelerated object has the class, the members and the state of the original."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import re
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from langchain_classic.agents import AgentExecutor
from langchain_classic.chains import ConversationalRetrievalChain, LLMChain, RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents.stuff import StuffDocumentsChain
from langchain_classic.memory import ConversationBufferMemory
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import LLMChainExtractor
from langchain_core.agents import AgentFinish
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
)
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.accelerated import ENTRY_POINTS
from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import RegistrationError
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore
from teola_plugin.pool import EnginePool

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Farm(BaseRetriever):
    """Returns `k` documents for each query, and keeps the queries."""

    k: int = 1
    queries: list[Any] = []

    def _get_relevant_documents(self, query: Any, *, run_manager: Any) -> list[Document]:
        self.queries.append(query)
        return [Document(page_content=f"{query} {i}") for i in range(self.k)]


class Doubling(Runnable[int, int]):
    """A Runnable of the user's own, which keeps its state in slots and behind a property."""

    __slots__ = ("_factor", "calls")

    def __init__(self) -> None:
        self._factor, self.calls = 2, 0

    @property
    def factor(self) -> int:
        return self._factor

    @factor.setter
    def factor(self, value: int) -> None:
        self._factor = value

    def invoke(self, input: int, config: Any = None, *, bonus: int = 0, **kwargs: Any) -> int:
        self.calls += 1
        return input * self.factor + bonus


class State(TypedDict):
    n: int


def increment(n: int) -> int:
    return n + 1


def increase(state: State) -> State:
    return {"n": state["n"] + 1}


def repeated(pieces: Iterator[Any]) -> Iterator[Any]:
    yield from pieces


@tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"sunny in {city}"


def chat() -> FakeListChatModel:
    return FakeListChatModel(responses=["one"])


def text_model() -> FakeListLLM:
    return FakeListLLM(responses=["one"])


def store() -> InMemoryVectorStore:
    stored = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    stored.add_texts(["oats", "hay", "corn"])
    return stored


def question_chain() -> Any:
    return PromptTemplate.from_template("{question}") | text_model() | StrOutputParser()


def answer_chain() -> Any:
    return PromptTemplate.from_template("{context} {input}") | text_model()


def llm_chain() -> LLMChain:
    return LLMChain(llm=text_model(), prompt=PromptTemplate.from_template("{question}"))


def stuff() -> StuffDocumentsChain:
    chain = LLMChain(llm=text_model(), prompt=PromptTemplate.from_template("{context} {question}"))
    return StuffDocumentsChain(llm_chain=chain, document_variable_name="context")


def conversation() -> ConversationalRetrievalChain:
    memory = ConversationBufferMemory(memory_key="chat_history", return_messages=True)
    return ConversationalRetrievalChain(
        retriever=Farm(), combine_docs_chain=stuff(), question_generator=llm_chain(), memory=memory
    )


def executor() -> AgentExecutor:
    agent = RunnableLambda(lambda state: AgentFinish({"output": "sunny"}, "")).with_config(run_name="agent")
    return AgentExecutor(agent=agent, tools=[weather])


def graph() -> Any:
    inner = StateGraph(State).add_node("more", increase).add_edge(START, "more").compile()
    return StateGraph(State).add_node("inner", inner).add_edge(START, "inner").compile(name="counter")


TEXT, QUESTION = "oats", {"question": "oats"}
OBJECTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "lambda": (lambda: RunnableLambda(increment), 1),
    "generator": (lambda: RunnableGenerator(repeated), "a"),
    "sequence": (question_chain, QUESTION),
    "parallel": (lambda: RunnableParallel(a=RunnableLambda(increment), b=RunnablePassthrough()), 1),
    "assign": (lambda: RunnablePassthrough.assign(answer=question_chain()).assign(more=question_chain()), QUESTION),
    "passthrough": (RunnablePassthrough, 1),
    "pick": (lambda: RunnablePick("question"), QUESTION),
    "branch": (lambda: RunnableBranch((lambda n: n > 1, RunnableLambda(increment)), RunnablePassthrough()), 2),
    "router": (lambda: RouterRunnable({"one": RunnableLambda(increment)}), {"key": "one", "input": 1}),
    "binding": (lambda: question_chain().with_config(tags=["mine"]), QUESTION),
    "bound arguments": (lambda: chat().bind(stop=["c"]), TEXT),
    "retry": (lambda: question_chain().with_retry(), QUESTION),
    "fallbacks": (lambda: question_chain().with_fallbacks([question_chain()]), QUESTION),
    "map": (lambda: RunnableLambda(increment).map(), [1, 2]),
    "configurable": (lambda: Farm().configurable_fields(k=ConfigurableField(id="k")), TEXT),
    "alternatives": (lambda: chat().configurable_alternatives(ConfigurableField(id="m"), other=chat()), TEXT),
    "prompt": (lambda: ChatPromptTemplate.from_template("{question}"), QUESTION),
    "parser": (StrOutputParser, "text"),
    "chat model": (chat, TEXT),
    "text model": (text_model, TEXT),
    "tool": (lambda: weather, {"city": "Ghent"}),
    "retriever": (lambda: Farm(queries=[]), TEXT),
    "store's retriever": (lambda: store().as_retriever(search_kwargs={"k": 2}), TEXT),
    "multi query": (lambda: MultiQueryRetriever.from_llm(Farm(queries=[]), text_model()), TEXT),
    "ensemble": (lambda: EnsembleRetriever(retrievers=[Farm(), Farm(k=2)], weights=[0.5, 0.5]), TEXT),
    "merger": (lambda: MergerRetriever(retrievers=[Farm(), Farm(k=2)]), TEXT),
    "compression": (
        lambda: ContextualCompressionRetriever(
            base_retriever=Farm(), base_compressor=LLMChainExtractor.from_llm(text_model())
        ),
        TEXT,
    ),
    "retrieval chain": (lambda: create_retrieval_chain(Farm(queries=[]), answer_chain()), {"input": "oats"}),
    "LLMChain": (llm_chain, QUESTION),
    "RetrievalQA": (lambda: RetrievalQA(combine_documents_chain=stuff(), retriever=Farm()), {"query": "oats"}),
    "conversation": (conversation, QUESTION),
    "agent executor": (executor, {"input": "weather?"}),
    "slots": (Doubling, 3),
    "graph": (graph, {"n": 1}),
}
every_object = pytest.mark.parametrize("name", OBJECTS)


def built(name: str) -> tuple[Any, Any]:
    """Return an object, and an input for it."""
    build, value = OBJECTS[name]
    return build(), value


def without_ids(result: Any) -> str:
    """Return a text that is equal for equal results: without identifiers and addresses."""
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|0x[0-9a-f]+", "", repr(result))


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class of what it raises."""
    try:
        return call()
    except Exception as error:
        return type(error)


@every_object
def test_accelerated_object_is_an_instance_of_the_originals_class(name: str) -> None:
    original, _ = built(name)
    fast = accelerate(original)
    assert isinstance(fast, type(original))
    assert fast.original is original
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(fast), attribute) == getattr(type(original), attribute)


@every_object
def test_accelerated_object_has_every_member_of_the_original(name: str) -> None:
    original, _ = built(name)
    fast = accelerate(original)
    assert set(dir(original)) <= set(dir(fast))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        missing = [
            member
            for member in dir(original)
            if outcome(lambda: getattr(original, member)) is not AttributeError  # noqa: B023
            and outcome(lambda: getattr(fast, member)) is AttributeError  # noqa: B023
        ]
    assert missing == []


@every_object
def test_accelerated_object_has_the_field_values_of_the_original(name: str) -> None:
    original, _ = built(name)
    fast = accelerate(original)
    fields = [*getattr(type(original), "model_fields", ()), *getattr(original, "__dict__", ())]
    assert all(getattr(fast, field) is getattr(original, field) for field in fields)


@every_object
def test_setting_a_field_sets_it_on_the_original(name: str) -> None:
    original, _ = built(name)
    fast = accelerate(original)
    for field in getattr(type(original), "model_fields", ("name",)):
        value = copy.copy(getattr(original, field, None))
        setattr(fast, field, value)
        assert getattr(fast, field) is getattr(original, field)


@every_object
def test_field_set_on_the_original_is_set_on_accelerated_object(name: str) -> None:
    original, _ = built(name)
    fast = accelerate(original)
    for field in getattr(type(original), "model_fields", ("name",)):
        setattr(original, field, copy.copy(getattr(original, field, None)))
        assert getattr(fast, field) is getattr(original, field)


@every_object
def test_entry_points_have_the_originals_signatures(name: str) -> None:
    original, _ = built(name)
    fast = accelerate(original)
    for entry in ENTRY_POINTS:
        assert inspect.signature(getattr(fast, entry)) == inspect.signature(getattr(original, entry))
        mine, theirs = getattr(type(fast), entry), getattr(type(original), entry)
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(theirs)


@every_object
def test_accelerated_object_composes_with_other_runnables(name: str) -> None:
    plain, value = built(name)
    original, _ = built(name)
    fast = accelerate(original)
    after = RunnableLambda(lambda result: ("after", result))
    before = RunnableLambda(lambda given: given)
    for combine in (
        lambda one: one | after,
        lambda one: before | one,
        lambda one: RunnableSequence(before, one, after),
        lambda one: RunnableParallel(part=one),
        lambda one: one.with_config(tags=["tag"]),
        lambda one: one.map() | after,
    ):
        mapped = combine(fast).__class__ is combine(plain).__class__
        assert mapped or isinstance(combine(fast), type(combine(plain)))
    results = [(before | obj | after).invoke(value) for obj in (plain, fast)]
    assert without_ids(results[0]) == without_ids(results[1])


@every_object
@pytest.mark.parametrize("entry", ["invoke", "batch", "stream"])
def test_entry_points_give_the_originals_results(name: str, entry: str) -> None:
    plain, value = built(name)
    original, _ = built(name)
    fast = accelerate(original)
    given = [value] if entry == "batch" else value
    results = [outcome(lambda obj=obj: getattr(obj, entry)(given)) for obj in (plain, fast)]  # type: ignore[misc]
    if entry == "stream":
        results = [list(chunks) for chunks in results]
    assert without_ids(results[0]) == without_ids(results[1])


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda obj: pickle.loads(pickle.dumps(obj)),
    "model_copy": lambda obj: obj.model_copy() if hasattr(obj, "model_copy") else copy.copy(obj),
}


@every_object
@pytest.mark.parametrize("way", COPIES)
def test_copy_works_if_a_copy_of_the_original_works(name: str, way: str) -> None:
    original, value = built(name)
    fast = accelerate(original)
    copied, expected = outcome(lambda: COPIES[way](fast)), outcome(lambda: COPIES[way](original))
    if isinstance(expected, type):
        assert isinstance(copied, type)
        return
    assert isinstance(copied, type(original))
    assert type(copied) is type(fast)
    assert copied.original is not original
    results = [outcome(lambda obj=obj: obj.invoke(value)) for obj in (copied, expected)]  # type: ignore[misc]
    assert without_ids(results[0]) == without_ids(results[1])


def test_copy_has_its_own_state() -> None:
    fast = accelerate(Farm(k=1))
    copied = copy.copy(fast)
    copied.k = 3
    assert fast.k == 1
    assert len(copied.invoke("oats")) == 3


def test_copy_of_a_bound_model_has_its_own_state() -> None:
    with EnginePool.local(fake_engines()) as pool:
        model = chat()
        fast = accelerate(model, pool=pool, bind=[(model, "llm")])
        copied = copy.copy(fast)
        copied.responses = ["two"]
        assert model.responses == fast.responses == ["one"]
        assert copied.invoke("why?").content == fast.invoke("why?").content


# ------------------------------------------------------------ members of single classes


def test_retriever_in_a_retrieval_chain_gets_the_question() -> None:
    farm = Farm(queries=[])
    create_retrieval_chain(accelerate(farm), answer_chain()).invoke({"input": "oats"})
    assert farm.queries == ["oats"]


def test_a_retriever_is_accepted_by_chains_that_check_its_class() -> None:
    chain = RetrievalQA(combine_documents_chain=stuff(), retriever=accelerate(Farm()))
    assert chain.invoke({"query": "oats"})["result"] == "one"


def test_field_set_on_accelerated_object_applies_to_the_next_call() -> None:
    fast = accelerate(Farm(queries=[]))
    fast.k = 3
    assert len(fast.invoke("oats")) == 3


def test_replaced_parts_of_a_composite_apply_to_the_next_call() -> None:
    original = EnsembleRetriever(retrievers=[Farm(), Farm()], weights=[0.5, 0.5])
    fast = accelerate(original, concurrent=[Farm])
    fast.invoke("oats")
    original.retrievers = [Farm(k=3), Farm(k=3)]
    assert len(fast.invoke("oats")) == 3


def test_composite_parts_changed_in_place_apply_to_the_next_call() -> None:
    original = EnsembleRetriever(retrievers=[Farm(), Farm()], weights=[0.5, 0.5])
    fast = accelerate(original, concurrent=[Farm])
    fast.invoke("oats")
    original.retrievers[0] = Farm(k=3)
    assert len(fast.invoke("oats")) == 3


def test_retriever_searches_with_search_kwargs_set_later() -> None:
    fast = accelerate(store().as_retriever())
    fast.search_kwargs = {"k": 1}
    assert len(fast.invoke("oats")) == 1
    assert fast.add_documents([Document(page_content="rye")])


def test_a_chain_keeps_the_methods_and_memory_of_its_class() -> None:
    chain = conversation()
    fast = accelerate(chain)
    assert fast.run("oats") == "one"
    assert fast.input_keys == chain.input_keys
    assert fast.memory is chain.memory
    assert len(fast.memory.chat_memory.messages) == 2
    assert accelerate(llm_chain()).apply([QUESTION]) == llm_chain().apply([QUESTION])


def test_agent_executor_can_be_iterated_step_by_step() -> None:
    fast = accelerate(executor())
    assert [step["output"] for step in fast.iter({"input": "weather?"})] == ["sunny"]
    assert fast.lookup_tool("weather") is weather


def test_configurable_fields_name_the_fields_of_the_original() -> None:
    fast = accelerate(Farm()).configurable_fields(k=ConfigurableField(id="how_many"))
    assert len(fast.invoke("oats", {"configurable": {"how_many": 3}})) == 3


def test_a_configurable_model_keeps_its_declarative_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain.chat_models import init_chat_model

    monkeypatch.setenv("OPENAI_API_KEY", "key")
    model = init_chat_model("openai:gpt-4o", configurable_fields=("temperature",))
    fast = accelerate(model)
    assert type(fast.bind_tools([weather])) is type(model.bind_tools([weather]))
    assert fast.with_structured_output(State) is not None


def test_fields_set_later_on_a_pool_model_apply_to_calls() -> None:
    with EnginePool.local(fake_engines()) as pool:
        model = ChatTeola(pool=pool, max_tokens=8)
        fast = accelerate(model)
        fast.max_tokens = 2
        assert model.max_tokens == 2
        assert fast.invoke("why?").usage_metadata["output_tokens"] == 2
        model.max_tokens = 4
        assert fast.invoke("why?").usage_metadata["output_tokens"] == 4


def test_objects_of_a_pool_keep_their_class() -> None:
    with EnginePool.local(fake_engines()) as pool:
        searched = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
        searched.add_texts(["oats", "hay"])
        retriever = searched.as_retriever(search_kwargs={"k": 1})
        fast = accelerate(retriever)
        assert isinstance(fast, type(retriever))
        assert fast.invoke("oats") == retriever.invoke("oats")
        assert create_retrieval_chain(fast, answer_chain()).invoke({"input": "oats"})["context"]
        with pytest.raises(RegistrationError, match="cannot be pickled: its engines live in this process"):
            pickle.dumps(fast)


def test_sequence_extended_with_pipe_stays_accelerated() -> None:
    fast = accelerate(question_chain(), app="farm")
    longer = fast | RunnableLambda(str.upper)
    assert type(longer.original) is RunnableSequence
    assert longer.invoke(QUESTION) == "ONE"
    assert fast.pipe(RunnableLambda(str.upper)).explain()


def test_accelerating_an_accelerated_chain_keeps_the_original() -> None:
    original = question_chain()
    again = accelerate(accelerate(original), app="farm")
    assert again.original is original
    assert again.invoke(QUESTION) == "one"


def test_original_runs_if_planning_for_changed_parts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EnsembleRetriever(retrievers=[Farm(), Farm()], weights=[0.5, 0.5])
    fast = accelerate(original, concurrent=[Farm])
    original.retrievers = [Farm(k=2), Farm(k=2)]
    monkeypatch.setattr("teola_plugin.adapters.langchain.accelerate.routing_of", None)
    assert len(fast.invoke("oats")) == 2


class Deprecated(Runnable[int, int]):
    """Warns its caller in each entry point."""

    def invoke(self, input: int, config: Any = None, **kwargs: Any) -> int:
        warnings.warn("invoke", UserWarning, stacklevel=2)
        return input

    async def ainvoke(self, input: int, config: Any = None, **kwargs: Any) -> int:
        warnings.warn("ainvoke", UserWarning, stacklevel=2)
        return input

    def batch(self, inputs: list[int], config: Any = None, **kwargs: Any) -> list[int]:  # type: ignore[override]
        warnings.warn("batch", UserWarning, stacklevel=2)
        return inputs

    def stream(self, input: int, config: Any = None, **kwargs: Any) -> Iterator[int]:
        warnings.warn("stream", UserWarning, stacklevel=2)
        yield input

    async def astream(self, input: int, config: Any = None, **kwargs: Any) -> AsyncIterator[int]:
        warnings.warn("astream", UserWarning, stacklevel=2)
        yield input


async def streamed(obj: Any) -> list[Any]:
    return [chunk async for chunk in obj.astream(1)]


async def awaited(obj: Any) -> Any:
    return await obj.ainvoke(1)


WARNING_CALLS: dict[str, Callable[[Any], Any]] = {
    "invoke": lambda obj: obj.invoke(1),
    "ainvoke": lambda obj: asyncio.run(awaited(obj)),
    "batch": lambda obj: obj.batch([1]),
    "stream": lambda obj: list(obj.stream(1)),
    "astream": lambda obj: asyncio.run(streamed(obj)),
}


@pytest.mark.parametrize("entry", WARNING_CALLS)
@pytest.mark.parametrize("pool", [False, True])
def test_warnings_name_the_line_of_the_user(entry: str, pool: bool) -> None:
    with EnginePool.local(fake_engines()) as engines:
        fast = accelerate(Deprecated(), pool=engines if pool else None)
        places = []
        for obj in (Deprecated(), fast):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                WARNING_CALLS[entry](obj)
            places.append([(one.filename, one.lineno) for one in caught])
    assert places[0] == places[1]
    assert {file for file, _ in places[1]} == {__file__}


def test_warnings_of_a_graph_name_the_line_of_the_user() -> None:
    places = []
    for obj in (graph(), accelerate(graph())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            list(obj.stream({"n": 1}, checkpoint_during=True))
        places.append([(one.filename, one.lineno) for one in caught])
    assert places[0] == places[1]
    assert __file__ in {file for file, _ in places[1]}


def test_a_traceback_shows_the_source_of_entry_points() -> None:
    def fail(n: int) -> int:
        raise ValueError(n)

    with pytest.raises(ValueError, match="1") as caught:
        accelerate(RunnableLambda(fail)).invoke(1)
    text = "".join(traceback.format_exception(caught.value))
    assert "started.chain.invoke(input" in text


def test_an_accelerated_object_equals_its_original() -> None:
    original = RunnablePassthrough[str]()
    assert accelerate(original) == original
    assert original == accelerate(original)
    assert accelerate(original) != RunnablePassthrough(lambda x: x)


def test_accelerated_generic_runnable_has_the_originals_name() -> None:
    original = RunnableBranch[int, int]((lambda x: x > 0, lambda x: x + 1), lambda x: x - 1)
    fast = accelerate(original)
    assert fast.get_name() == original.get_name() == "RunnableBranch"
    assert fast.get_input_jsonschema() == original.get_input_jsonschema()


def test_method_patched_on_an_accelerated_object_is_called_once() -> None:
    class Length(Runnable[str, int]):
        def invoke(self, input: str, config: Any = None, **kwargs: Any) -> int:
            return len(input)

    original = Length()
    fast = accelerate(original)
    with mock.patch.object(fast, "invoke", wraps=fast.invoke) as spy:
        assert fast.invoke("abc") == 3
        assert fast.batch(["a", "bb"]) == [1, 2]
        assert spy.call_count == 3
    assert fast.invoke("abcd") == 4
    assert vars(original) == {}


async def test_bound_event_version_is_used_by_astream_events() -> None:
    model = FakeListChatModel(responses=["answer"]).bind(version="v3")
    stream = await accelerate(model).astream_events("question")
    assert (await stream.output).text == "answer"


def test_method_patched_on_an_accelerated_graph_is_called_once() -> None:
    class Counter(TypedDict):
        count: int

    graph = StateGraph(Counter)
    graph.add_node("increment", lambda state: {"count": state["count"] + 1})
    graph.add_edge(START, "increment")
    fast = accelerate(graph.compile())
    with mock.patch.object(fast, "stream", wraps=fast.stream) as spy:
        assert fast.invoke({"count": 1}) == {"count": 2}
        assert spy.call_count == 1
    assert fast.invoke({"count": 2}) == {"count": 3}
