"""Tests of LlamaIndex's code as `shims.llamaindex` calls or overrides it: the same results, without events."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import pkgutil
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from banks.env import env
from differential.llamaindex.recording import Recorder, recorded
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks import CallbackManager, CBEventType
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform.base import DecomposeQueryTransform, HyDEQueryTransform
from llama_index.core.llms import ChatMessage, ChatResponse, MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.output_parsers import SelectionOutputParser
from llama_index.core.postprocessor import LLMRerank, SimilarityPostprocessor
from llama_index.core.prompts import PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompts import DEFAULT_HYDE_PROMPT
from llama_index.core.query_engine import (
    CitationQueryEngine,
    MultiStepQueryEngine,
    RetryQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import Accumulate, CompactAndRefine, SimpleSummarize
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.selectors import LLMMultiSelector, PydanticMultiSelector
from llama_index.core.types import Thread
from llama_index.core.vector_stores.types import VectorStoreQueryResult
from llama_index_instrumentation import DispatcherSpanMixin
from llama_index_instrumentation.dispatcher import Dispatcher
from support.llamaindex_engines import CALLS, Library, response_parts
from support.llamaindex_records import summary_index

import teola_plugin.shims.llamaindex
from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import Generation
from teola_plugin.shims.llamaindex import (
    copies,
    engines,
    models,
    queries,
    records,
    retrieval,
    silent_calls,
)
from teola_plugin.shims.llamaindex import synthesizers as writers
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.tracer.llamaindex import model_calls

ASKED = "what is there"
TEXTS = ["oats and ivy", "a boat with a sail"]


def nodes(*texts: str) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(id_=text, text=text), score=0.5) for text in texts]


def contents(found: Any) -> list[str]:
    return [one.node.get_content() for one in found]


def quietly(owner: Any, call: Callable[[], Any]) -> Any:
    """Return the result of a call that must send no events."""
    recorder = Recorder()
    with recorded(recorder):
        value = call()
    notifications = [text for part in (recorder.callbacks, recorder.events, recorder.spans) for text in part]
    assert not [text for text in notifications if f"{type(owner).__name__}." in text]
    return value


def test_every_shim_function_has_a_test() -> None:
    source = inspect.getsource(importlib.import_module(__name__))
    names = [f"test_shims_llamaindex_{what}" for what in ("models", "silent_calls", "workflows")]
    names.append("test_interceptors_llamaindex")
    beside = "".join(
        inspect.getsource(importlib.import_module(f"{__package__ or ''}.{one}".lstrip("."))) for one in names
    )
    package = teola_plugin.shims.llamaindex
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for name, one in vars(module).items():
            public = getattr(one, "__module__", "") == found.name and not name.startswith("_")
            if public and (inspect.isfunction(one) or name.endswith("Hooks")) and not found.name.endswith("records"):
                assert f".{name}" in source + beside, f"{found.name}.{name} has no test"


# ------------------------------------------------------------ engines


def test_engine_of_an_index_is_made_without_a_change_of_the_llm(stock: Library) -> None:
    manager = CallbackManager([])
    llm = MockLLM(callback_manager=manager)

    engine = engines.make_query_engine(stock.index, llm, {"similarity_top_k": 1})

    assert llm.callback_manager is manager
    assert str(engine.query(ASKED)) == str(stock.index.as_query_engine(llm, similarity_top_k=1).query(ASKED))
    assert llm.callback_manager is not manager


def test_citation_sources_equal_those_of_the_engine(stock: Library) -> None:
    engine = CitationQueryEngine(retriever=stock.index.as_retriever(), llm=stock.llm, citation_chunk_size=64)
    found = engine.retriever.retrieve(ASKED)
    made = quietly(engine, lambda: engines.citation_sources(engine, found))
    assert contents(made) == contents(engine.query(ASKED).source_nodes)


def test_sub_question_node_equals_that_of_the_engine(stock: Library) -> None:
    engine = SubQuestionQueryEngine.from_defaults(
        stock.tools(), llm=stock.llm, question_gen=LLMQuestionGenerator.from_defaults(stock.llm), use_async=False
    )
    response = engine.query(ASKED)
    answer = str(stock.tools()[0].query_engine.query("what grows"))
    made = engines.sub_question_node(engine, "what grows", "farm", answer, [])
    assert made.node.get_content() == contents(response.source_nodes)[0]


@pytest.fixture
def answer() -> StreamingAgentChatResponse:
    pieces = (ChatResponse(message=ChatMessage(content=text), delta=text) for text in ("oats ", "grow"))
    return StreamingAgentChatResponse(chat_stream=pieces)


def test_history_writer_is_the_thread_of_its_response(answer: StreamingAgentChatResponse) -> None:
    if records.is_older_than("0.14.17"):
        pytest.skip("a response knows its thread since llama-index-core 0.14.17")
    thread = threading.Thread()
    answer.write_response_to_history_thread = thread
    assert engines.history_writer(answer) is thread


def test_history_writer_is_found_among_running_threads(
    answer: StreamingAgentChatResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(StreamingAgentChatResponse, "write_response_to_history_thread", raising=False)
    vars(answer).pop("write_response_to_history_thread", None)
    begins = threading.Event()
    memory: Any = SimpleNamespace(put=lambda message: begins.wait(10))
    thread = Thread(target=answer.write_response_to_history, args=(memory,))
    thread.start()
    writer = engines.history_writer(answer)
    begins.set()
    thread.join()
    assert writer is thread
    assert engines.history_writer(answer) is None


async def test_history_writer_is_the_task_of_its_response(answer: StreamingAgentChatResponse) -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    answer.awrite_response_to_history_task = task
    assert engines.history_writer(answer) is task
    await task


def test_query_hooks_run_below_the_public_entries(stock: Library) -> None:
    engine = stock.rag()
    with engine.callback_manager.as_trace("query"):
        below = engines.query_below(engine, QueryBundle(ASKED))
    assert response_parts(below) == response_parts(engine.query(ASKED))

    class Around(engines.QueryHooks):
        def __teola_query__(self, query: QueryBundle, plain: Callable[[Any], Any]) -> Any:
            return Response(f"around {plain(engine)}")

        async def __teola_aquery__(self, query: QueryBundle, plain: Callable[[Any], Any]) -> Any:
            return Response(f"around {await plain(engine)}")

    own = copies.sharing(type("Own", (Around, type(engine)), {}), engine)
    assert str(own.query(ASKED)) == str(asyncio.run(own.aquery(ASKED))) == f"around {engine.query(ASKED)}"


def test_replaced_aquery_keeps_the_span_of_its_engine(stock: Library) -> None:
    engine = RetryQueryEngine(stock.rag(), RelevancyEvaluator(stock.llm))

    async def other(node: Any, query: QueryBundle) -> Any:
        return Response(f"other of {type(node).__name__}: {query.query_str}")

    def spans(node: Any) -> Any:
        recorder = Recorder()
        with recorded(recorder):
            value = asyncio.run(node.aquery(ASKED))
        return value, recorder.spans

    made = engines.with_aquery(engine, other)
    value, recorded_spans = spans(made)
    assert str(value) == f"other of RetryQueryEngine: {ASKED}"
    own = {f"{way} /RetryQueryEngine.aquery/RetryQueryEngine._aquery " for way in ("enter", "exit")}
    assert own <= recorded_spans.keys() and own <= spans(engine)[1].keys()


def test_multi_step_aquery_equals_that_of_the_engine(stock: Library) -> None:
    engine = MultiStepQueryEngine(stock.rag(), HyDEQueryTransform(stock.llm), num_steps=1)
    with engine.callback_manager.as_trace("query"):
        below = asyncio.run(engines.multi_step_aquery(engine, QueryBundle(ASKED)))
    assert response_parts(below) == response_parts(asyncio.run(engine.aquery(ASKED)))


def test_index_hooks_insert_the_nodes(stock: Library) -> None:
    added: list[list[str]] = []

    class Around(engines.IndexHooks):
        def __teola_add__(self, nodes: engines.Nodes, add: Callable[[Any, engines.Nodes], None]) -> None:
            for node in nodes:
                added.append([node.node_id])
                add(self, [node])

        async def __teola_aadd__(self, nodes: engines.Nodes, add: Callable[[Any, engines.Nodes], Any]) -> None:
            added.append([node.node_id for node in nodes])
            await add(stock.index, nodes)

    own = copies.sharing(type("Own", (Around, type(stock.index)), {}), stock.index)
    more = [TextNode(id_="a1", text="a"), TextNode(id_="a2", text="b")]
    own.insert_nodes(more)
    asyncio.run(own.ainsert_nodes([TextNode(id_="a3", text="c")]))
    assert added == [["a1"], ["a2"], ["a3"]]
    store: Any = stock.index.vector_store
    assert len(store.get_nodes(["a1", "a2", "a3"])) == 3
    store.delete_nodes(["a1", "a2", "a3"])


def test_without_span_keeps_a_method_unwrapped() -> None:
    class Base(DispatcherSpanMixin):
        @abstractmethod
        def ask(self) -> None: ...

    def ask(self: Any) -> None: ...

    kind: Any = type("Sub", (Base,), {"ask": engines.without_span(ask)})
    assert inspect.getattr_static(kind, "ask") is ask


# ------------------------------------------------------------ objects that share state


class WithSlots:
    __slots__ = ("__dict__", "note")

    def __init__(self) -> None:
        self.part, self.count, self.note = "own", 0, "kept"
        self.method = self.read

    def read(self) -> str:
        return str(self.part)


def test_slots_are_copied_to_another_object() -> None:
    other: Any = object.__new__(WithSlots)
    assert copies.with_slots_of(WithSlots(), other) is other
    assert other.note == "kept"


# ------------------------------------------------------------ retrievers


def test_index_search_parts_equal_the_retrievers_results(stock: Library) -> None:
    retriever: Any = stock.index.as_retriever(similarity_top_k=3)
    assert retrieval.searches_by_vector(retriever)
    store_query = retrieval.store_query(retriever)
    assert store_query.similarity_top_k == 3 and store_query.query_embedding == [0.0]
    whole = [one.node for one in retriever.retrieve(ASKED)]
    result = VectorStoreQueryResult(nodes=whole, similarities=[0.5] * 3, ids=[one.node_id for one in whole])
    assert [
        one.node for one in quietly(retriever, lambda: retrieval.nodes_of_result(retriever, ASKED, result))
    ] == whole
    twice = [*retriever.retrieve(ASKED), *retriever.retrieve(ASKED)]
    assert quietly(retriever, lambda: retrieval.deduplicate_nodes(retriever, ASKED, twice)) == twice[:3]


def test_all_nodes_equal_those_the_retriever_returns(stock: Library) -> None:
    retriever: Any = summary_index(stock).as_retriever()
    assert contents(quietly(retriever, lambda: retrieval.all_nodes(retriever, ASKED))) == contents(
        retriever.retrieve(ASKED)
    )


@pytest.mark.parametrize("mode", ["simple", "reciprocal_rerank", "relative_score", "dist_based_score"])
def test_fused_results_equal_those_of_the_retriever(stock: Library, mode: str) -> None:
    retriever = stock.fusion(mode)
    written = quietly(retriever, lambda: retrieval.generate_queries(retriever, stock.llm, ASKED))
    assert written == ["what grows", "what sails"]
    inner = [stock.index.as_retriever(similarity_top_k=k) for k in (4, 2)]
    lists = {(query, i): one.retrieve(query) for query in (ASKED, *written) for i, one in enumerate(inner)}
    made = quietly(retriever, lambda: retrieval.fuse_results(retriever, ASKED, lists))
    assert [(one.score, one.node_id) for one in made] == [(n.score, n.node_id) for n in retriever.retrieve(ASKED)]


# ------------------------------------------------------------ synthesizers


def test_get_response_equals_the_synthesizers_answer(stock: Library) -> None:
    synth = SimpleSummarize(stock.llm, streaming=True)
    plain = SimpleSummarize(stock.llm).get_response(ASKED, TEXTS)
    own = copy.copy(stock.llm)
    found = quietly(synth, lambda: writers.get_response(writers.SimpleSummarizeParts, synth, ASKED, TEXTS, llm=own))
    assert found == plain and synth._streaming and synth._llm is stock.llm


def test_compact_chunks_packs_short_texts_into_one(stock: Library) -> None:
    synth = CompactAndRefine(stock.llm)
    [packed] = writers.compact_chunks(synth, ASKED, TEXTS)
    assert packed == "\n\n".join(TEXTS)
    short = PromptTemplate("{context_str}{query_str}")
    assert writers.compact_chunks(synth, ASKED, TEXTS, text_qa_template=short) == [packed]


def test_joined_answers_equal_the_accumulated_response(stock: Library) -> None:
    template = PromptTemplate("Of {context_str}: {query_str}")
    own = writers.copy_accumulate(Accumulate(stock.llm), template)
    answers = [
        stock.llm.predict(
            template.partial_format(query_str=ASKED),
            **{k: v for k, v in writers.chunk_arguments(own, text).items() if k != "template"},
        )
        for text in TEXTS
    ]
    made = writers.join_answers(own, answers, writers.separator(own))
    assert made == Accumulate(stock.llm, text_qa_template=template).get_response(ASKED, TEXTS)


# ------------------------------------------------------------ queries, choices, nodes


def test_transformed_queries_equal_those_of_the_originals(stock: Library) -> None:
    hyde = HyDEQueryTransform(stock.llm)
    prompt: Any = DEFAULT_HYDE_PROMPT
    document = quietly(hyde, lambda: queries.hypothetical_document(hyde, stock.llm, prompt, ASKED, {}))
    assert document == hyde.run(ASKED).custom_embedding_strs[0]
    transform = DecomposeQueryTransform(stock.llm)
    prompt = transform.get_prompts()["decompose_query_prompt"]
    query = quietly(transform, lambda: queries.decomposed_query(transform, stock.llm, prompt, ASKED, {}))
    assert query == transform.run(ASKED).query_str


def test_selected_indices_and_questions_equal_the_originals(stock: Library) -> None:
    selector = LLMMultiSelector.from_defaults(stock.llm)
    choices, prompt = [one.metadata for one in stock.tools()], selector.get_prompts()["prompt"]
    found = quietly(selector, lambda: queries.selected_indices(selector, stock.llm, prompt, choices, ASKED))
    assert found == selector.select(choices, ASKED).inds == [0, 1]
    generator = LLMQuestionGenerator.from_defaults(stock.llm)
    prompt = generator.get_prompts()["question_gen_prompt"]
    questions = quietly(generator, lambda: queries.generated_questions(generator, stock.llm, prompt, choices, ASKED))
    plain = generator.generate(choices, QueryBundle(ASKED))
    assert questions == [one.model_dump() for one in plain] and len(questions) == 3


def test_called_indices_equal_the_selectors_choices(stock: Library) -> None:
    selector: Any = PydanticMultiSelector.from_defaults(llm=stock.calling)  # type: ignore[arg-type]
    choices, program = [one.metadata for one in stock.tools()], selector._selector_program

    def choose(llm: Any, given: Any) -> list[int]:
        return queries.called_indices(selector, program, llm, program.prompt, choices, given["query"])

    answers = [Generation(CALLS["MultiSelection"], "stop", 1, 1, 0)]
    found = quietly(program, lambda: model_calls.replay_generations(stock.calling, choose, {"query": ASKED}, answers))
    assert found == selector.select(choices, ASKED).inds == [0, 1]


def test_postprocessing_equals_that_of_the_original(stock: Library) -> None:
    found = stock.index.as_retriever(similarity_top_k=4).retrieve(ASKED)
    step = SimilarityPostprocessor(similarity_cutoff=-1.0)
    made = quietly(step, lambda: retrieval.postprocess(step, found, ASKED))
    assert made == step.postprocess_nodes(found) == found
    rerank = LLMRerank(llm=stock.llm, choice_batch_size=3)
    groups = retrieval.batches(rerank, found)
    assert [[one.node_id for one in group] for group in groups] == [[n.node_id for n in found[:3]], [found[3].node_id]]
    arguments = retrieval.batch_arguments(rerank, groups[1], ASKED)
    assert arguments["query_str"] == ASKED and found[3].node.get_content()[:20] in str(arguments)


# ------------------------------------------------------------ copies


def test_shallow_copies_share_the_attribute_values(stock: Library) -> None:
    engine: Any = TransformQueryEngine(stock.rag(), HyDEQueryTransform(stock.llm))
    assert set(map(id, vars(engine).values())) == set(map(id, copies.attribute_values(engine)))
    engine.bound = engine.query
    made = copies.with_attributes(engine, vars(engine))
    assert made.bound.__self__ is made and made._query_engine is engine._query_engine
    noisy = stock.fusion()
    noisy._verbose = True
    quiet = copies.clone(noisy, num_queries=9)
    assert (quiet._verbose, quiet.num_queries, noisy._verbose, noisy.num_queries) == (False, 9, True, 3)
    rerank = LLMRerank(llm=stock.llm)
    assert rerank._format_node_batch_fn in copies.attribute_values(rerank)


def test_sharing_copy_writes_through_to_the_original(stock: Library) -> None:
    rerank = LLMRerank(llm=stock.llm)
    cls: Any = type("LLMRerank", (LLMRerank,), {})
    both = copies.sharing(cls, rerank)
    both.top_n = 77
    assert rerank.top_n == 77


def test_silent_copies_give_the_same_results() -> None:
    manager = CallbackManager([Recorder()])
    splitter = SentenceSplitter(chunk_size=16, chunk_overlap=0, callback_manager=manager)
    text = " ".join(TEXTS * 9)
    quiet = copies.silent_splitter(splitter)
    assert quietly(splitter, lambda: quiet.split_text(text)) == splitter.split_text(text)
    assert copies.silent_callback_manager().handlers == []
    silent = copies.with_silent_methods(splitter, "split_text")
    assert silent.split_text(text) == splitter.split_text(text)
    assert copies.without_spans(splitter, "split_text")(text) == splitter.split_text(text)
    template = PromptTemplate("{a}", output_parser=SelectionOutputParser())
    copied: Any = copies.copy_template(template)
    assert copied.output_parser is not template.output_parser and copied.format(a="x") == template.format(a="x")


def test_prompt_helper_copy_packs_equally_and_tokenizes_once(stock: Library) -> None:
    counted: list[str] = []

    def tokens(text: str) -> list[str]:
        counted.append(text)
        return text.split()

    helper = CompactAndRefine(stock.llm)._prompt_helper
    helper._token_counter.tokenizer = tokens
    own, template = copies.copy_prompt_helper(helper), PromptTemplate("{context_str}")
    assert own.repack(template, TEXTS * 40, llm=stock.llm) == helper.repack(template, TEXTS * 40, llm=stock.llm)
    counted.clear()
    for _ in range(2):
        own.repack(template, TEXTS, llm=stock.llm)
    assert len(counted) == len(set(counted))


# ------------------------------------------------------------ prompts of any LLM


def test_messages_of_an_llm_are_rendered_from_its_template(stock: Library) -> None:
    template = PromptTemplate("Say {what}")
    [message] = models.messages_of(stock.llm, template, {"what": "it"})
    assert message.content == "Say it" == models.text_of(stock.llm, template, {"what": "it"})
    assert models.parse_output(stock.llm, "so") == "so"


# ------------------------------------------------------------ silence


def test_silent_context_notifies_no_handler_unlike_others(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    manager = CallbackManager([recorder])
    silent_calls.install_silencing()
    silent_calls.install_silencing()  # once is enough

    def called() -> None:
        with manager.as_trace("query"), manager.event(CBEventType.QUERY):
            MockLLM(callback_manager=manager).complete("why?")

    def silently() -> None:
        silent_calls.silence_context()
        called()

    with recorded(recorder):
        copy_context().run(silently)
        assert not recorder.callbacks and not recorder.events and not recorder.spans
        called()
    assert recorder.callbacks and recorder.events and recorder.spans
    monkeypatch.delattr(Dispatcher, "aevent")
    with pytest.raises(RegistrationError, match="tells its handlers in another way"):
        silent_calls.install_silencing()


# ------------------------------------------------------------ templates


CHAT = """{% chat role="system" %}Be brief.{% endchat %}{% chat role="user" %}{{ context_str }}
{{ query_str }}{% if also %} {{ also }}{% endif %}{% endchat %}"""


@pytest.mark.parametrize(
    "text", [CHAT, "{{ context_str }} of {{ query_str }}", "{% for x in query_str %}{{ x }}.{% endfor %}"]
)
def test_jinja_template_is_compiled_once_and_renders_equally(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RichPromptTemplate(text, template_var_mappings={"context_str": "context"} if "also" in text else None)
    made = copies.with_compiled_template(own)
    compiles: list[str] = []
    from_string = env.from_string
    monkeypatch.setattr(env, "from_string", lambda text: compiles.append(text) or from_string(text))
    for given in ({"context_str": "a", "query_str": "bc"}, {"context_str": "<d>", "query_str": "ef", "also": "g"}):
        for name in ("format", "format_messages"):
            assert getattr(made, name)(**given) == getattr(own, name)(**given)
            part = made.partial_format(query_str=given["query_str"])
            assert getattr(part, name)(**given) == getattr(own, name)(**given)
    plainly = 8
    assert isinstance(made, RichPromptTemplate) and type(made).__name__ == type(own).__name__
    assert len(compiles) <= plainly + 1, "once, besides the plain template's"
    template = PromptTemplate("{x}")
    assert copies.with_compiled_template(template) is template


def test_template_of_another_version_is_returned_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RichPromptTemplate, "format", None)
    copies._caching_template_class.cache_clear()
    own = RichPromptTemplate(CHAT)
    assert copies.with_compiled_template(own) is own
    copies._caching_template_class.cache_clear()


def test_text_of_an_answer_that_only_calls_tools_holds_the_answer() -> None:
    message = ChatMessage(role="assistant", content="", additional_kwargs={"tool_calls": [{"name": "Claim"}]})
    response = ChatResponse(message=message)

    text = silent_calls.text_of_answer(response)

    assert text == ""
    assert isinstance(text, silent_calls.ToolCallText)
    assert text.response == response


def test_text_of_an_answer_is_what_the_model_wrote() -> None:
    response = ChatResponse(message=ChatMessage(role="assistant", content="oats"))
    assert silent_calls.text_of_answer(response) == "oats"


def test_llm_with_a_method_of_its_own_has_own_structured_code() -> None:
    class OwnLLM(MockLLM):
        def structured_predict(self, *args: Any, **kwargs: Any) -> Any:
            return None

    assert silent_calls.has_own_structured_code(OwnLLM())
    assert not silent_calls.has_own_structured_code(MockLLM())


def test_code_that_runs_silently_returns_its_result_and_must_not_wait() -> None:
    async def give() -> str:
        return "oats"

    class Waiting:
        def __await__(self) -> Any:
            yield

    async def wait() -> None:
        await Waiting()

    assert silent_calls.run_silently(lambda: "oats") == "oats"
    assert silent_calls.run_silently(give) == "oats"
    with pytest.raises(Unreadable):
        silent_calls.run_silently(wait)
