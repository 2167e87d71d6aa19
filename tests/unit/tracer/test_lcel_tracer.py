"""Tests of templates and reports of chains (golden files), and of the templates' values against the original chains."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pytest
from beside import run_beside
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import (
    CommaSeparatedListOutputParser,
    JsonOutputParser,
    NumberedListOutputParser,
    StrOutputParser,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
)
from pool_leaves import PoolChat, PoolEmbedder, PoolIndexer, PoolReranker, PoolRetriever
from support.own_code import with_side_effect

from teola_plugin.errors import TraceError
from teola_plugin.graph import Ref, Role, build_pgraph
from teola_plugin.graph.graph import format_graph
from teola_plugin.passes import PassContext, default_pipeline
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.langchain.trace import trace

GOLDEN = Path(__file__).parents[2] / "golden" / "tracer"
MODEL = PoolChat()
ask = ChatPromptTemplate.from_template
EXPAND = ChatPromptTemplate.from_messages([("system", "Write 3 search queries."), ("human", "{question}")])
ANSWER = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer in {style}, from the context:\n{context}"),
        MessagesPlaceholder("history", optional=True),
        ("human", "{question}"),
    ]
).partial(style="one line")


@with_side_effect
def flatten(values: dict[str, Any]) -> list[Document]:
    return [document for found in values["found"] for document in found]


@with_side_effect
def joined(documents: list[Document]) -> str:
    return "\n".join(d.page_content for d in documents)


def advanced_rag() -> Runnable[Any, Any]:
    assign = RunnablePassthrough.assign
    return (
        assign(queries=EXPAND | MODEL | NumberedListOutputParser(), index=itemgetter("document") | PoolIndexer())
        | assign(found=itemgetter("queries") | PoolRetriever().map())
        | assign(docs=flatten)
        | assign(top={"query": itemgetter("question"), "documents": itemgetter("docs")} | PoolReranker())
        | assign(context=itemgetter("top") | RunnableLambda(joined))
        | ANSWER
        | MODEL.bind(stop=["\n\n"])
        | StrOutputParser()
    )


Q = {"question": "why?", "q": "why?", "mode": "m", "document": "a b c", "texts": ["t"], "a": 1, "b": 2}
CHAINS: dict[str, tuple[Callable[[], Any], Any]] = {
    "advanced_rag": (advanced_rag, Q),
    "independent_assigns": (
        lambda: (
            RunnablePassthrough.assign(a=ask("A {question}") | MODEL | StrOutputParser())
            | RunnablePassthrough.assign(b=ask("B {question} {mode}") | MODEL | StrOutputParser())
            | ask("{a}{b}{question}")
            | MODEL
        ),
        Q,
    ),
    "question_string": (
        lambda: (
            {"context": PoolRetriever(), "question": RunnablePassthrough()}
            | PromptTemplate.from_template("Use {context} for {question}")
            | MODEL
            | StrOutputParser()
        ),
        "why?",
    ),
    "lambda_between": (
        lambda: (
            {"context": itemgetter("q") | PoolRetriever() | joined, "question": itemgetter("q")}
            | ask("{context} {question}")
            | MODEL
        ),
        Q,
    ),
    "pick_one": (lambda: RunnablePassthrough.assign(x=itemgetter("q") | PoolRetriever()).pick("x"), Q),
    "pick_two": (lambda: RunnablePassthrough.assign(x=itemgetter("q") | PoolRetriever()).pick(["x", "q"]), Q),
    "nested_keys": (lambda: RunnableParallel(x={"y": itemgetter("q") | PoolRetriever()}, z=RunnablePassthrough()), Q),
    "model_alone": (lambda: itemgetter("q") | MODEL, Q),
    "prompt_read_twice": (
        lambda: ask("hi {q}") | {"a": MODEL, "b": RunnablePassthrough(), "c": RunnablePassthrough()},
        Q,
    ),
    "lines_by_lambda": (
        lambda: (
            ask("list {q}")
            | MODEL
            | StrOutputParser()
            | with_side_effect(lambda text: text.split("\n"))
            | PoolRetriever().map()
        ),
        Q,
    ),
    "json_by_schema": (
        lambda: (
            ask("list {q}")
            | PoolChat(items="json", expected=3)
            | JsonOutputParser()
            | itemgetter("queries")
            | PoolRetriever().map()
        ),
        None,
    ),
    "json_attribute": (
        lambda: ask("list {q}") | MODEL | JsonOutputParser() | attrgetter("queries") | (ask("do {x}") | MODEL).map(),
        None,
    ),
    "comma_map_of_chains": (
        lambda: (
            ask("list {q}")
            | MODEL
            | CommaSeparatedListOutputParser()
            | (ask("do {x}") | MODEL | StrOutputParser()).map()
        ),
        Q,
    ),
    "embedding_of_a_list": (lambda: ask("{q}") | MODEL | NumberedListOutputParser() | PoolEmbedder(), Q),
    "two_keys": (lambda: itemgetter("a", "b"), Q),
    "map_with_a_lambda_inside": (lambda: itemgetter("texts") | (PoolRetriever() | joined).map(), Q),
    "branch": (lambda: RunnableBranch((lambda x: True, MODEL), PoolRetriever()), "why?"),
    "side_effect": (lambda: RunnablePassthrough(print) | PoolRetriever(), "why?"),
    "bound_tools": (lambda: MODEL.bind(tools=[{"name": "t"}]), "why?"),
    "foreign_leaves": (
        lambda: (
            {"context": RunnableLambda(len), "q": RunnablePassthrough()}
            | ask("{context}{q}")
            | FakeListChatModel(responses=["x"])
            | StrOutputParser()
        ),
        "why?",
    ),
}


def made(name: str) -> Runnable[Any, Any]:
    return RunnableLambda(lambda x: x) if name == "" else _coerced(CHAINS[name][0]())


def _coerced(chain: Any) -> Runnable[Any, Any]:
    from langchain_core.runnables.base import coerce_to_runnable

    return coerce_to_runnable(chain)


@pytest.mark.parametrize("name", list(CHAINS))
def test_template_and_report_match_golden_file(name: str, request: pytest.FixtureRequest) -> None:
    traced = trace(made(name))
    watched = "\n".join(f"{'/'.join(path) or '(root)'}: {component}" for path, component in traced.watched.items())
    text = f"{format_graph(build_pgraph(traced.template), depths=False)}\n\n{traced.report}\n"
    text += f"\nwatched\n{watched}\n" if watched else ""
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def _all_lowered(traced: TraceResult) -> bool:
    return all(c.role is not Role.OPAQUE for c in traced.template.components)


LOWERED = [name for name, (_, value) in CHAINS.items() if value is not None and _all_lowered(trace(made(name)))]


@pytest.mark.parametrize("name", LOWERED)
def test_lowered_template_gives_the_original_chains_value(name: str) -> None:
    chain, value = made(name), CHAINS[name][1]
    plain = chain.invoke(value)
    beside = run_beside(trace(chain), value)
    assert _without_ids(beside) == _without_ids(plain)


def test_enough_chains_are_lowered_for_comparison() -> None:
    assert len(LOWERED) >= 9


def test_advanced_rag_template_equals_original_given_lambda_values() -> None:
    chain = advanced_rag()
    head = RunnableSequence(*chain.steps[:5])  # type: ignore[attr-defined]
    values = head.invoke(Q)
    assert run_beside(trace(chain), Q, {"docs": values["docs"], "context": values["context"]}) == chain.invoke(Q)


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_ids(inner) for inner in value]
    return value.model_copy(update={"id": None}) if hasattr(value, "model_copy") else value


def test_e_graphs_of_traced_chains_are_valid() -> None:
    for name in CHAINS:
        graph = default_pipeline().run(build_pgraph(trace(made(name)).template), PassContext()).graph
        assert len(graph) or graph.output.external


def test_assigned_keys_depend_on_what_they_read_only() -> None:
    traced = trace(made("independent_assigns"))
    assert dict(traced.template["b.model"].inputs) == {
        "question": Ref("$input", ("question",)),
        "mode": Ref("$input", ("mode",)),
    }
    assert ("a.parse", "b.model") in traced.template.order


def test_trivial_lambda_becomes_a_path_reference() -> None:
    chain = {"q": lambda x: x["question"], "deep": lambda x: x["a"]["b"][0]} | ask("{q}{deep}") | MODEL
    assert dict(trace(chain).template["model"].inputs) == {
        "q": Ref("$input", ("question",)),
        "deep": Ref("$input", ("a", "b", 0)),
    }


def test_a_pure_function_is_computed_from_the_keys_that_it_reads() -> None:
    def titles(values: dict[str, Any]) -> str:
        return ", ".join(sorted(values["titles"]))

    traced = trace({"all": titles, "kept": itemgetter("question")} | ask("{all}{kept}") | MODEL)
    assert traced.template["all"].role is Role.CALL
    assert dict(traced.template["all"].inputs) == {"titles": Ref("$input", ("titles",))}
    assert traced.calls["all"](titles=["b", "a"]) == "a, b"
    assert not traced.watched


def test_pure_function_rejects_objects_of_user_classes() -> None:
    class Odd(str):
        def strip(self, *_: Any) -> str:
            raise AssertionError("a side effect")

    call = trace(RunnableLambda(lambda text: text.strip()) | PoolRetriever()).calls["lambda"]
    assert call(value=" why? ") == "why?"
    with pytest.raises(TypeError, match="not known"):
        call(value=Odd("why?"))


def test_an_overwritten_key_is_the_new_value() -> None:
    chain = RunnablePassthrough.assign(q=itemgetter("q") | PoolRetriever()) | itemgetter("q")
    assert trace(chain).template.output == Ref("q.documents")


def test_sizes_estimate_chunks_of_the_query_input_and_never_raise() -> None:
    traced = trace(made("advanced_rag"))
    assert traced.sizes(Q) == {"index": 2}
    assert traced.sizes("no dictionary") == {} and traced.sizes({}) == {}


def test_chunks_come_from_the_leaf() -> None:
    assert [chunk.text for chunk in trace(made("advanced_rag")).calls["index"]("a b")] == ["a", "b"]


def test_leaves_declare_their_read_and_write_effects() -> None:
    traced = trace(made("advanced_rag"))
    (write,) = traced.template["index"].effects
    body = traced.template["found"].body
    assert body is not None
    (read,) = body["found.retrieve"].effects
    assert write.writes and read.conflicts(write) and read.validated


def test_only_the_generation_of_the_list_is_splittable() -> None:
    chain = (
        RunnablePassthrough.assign(queries=ask("{q}") | MODEL | NumberedListOutputParser(), hyde=ask("h {q}") | MODEL)
        | RunnableLambda(lambda values: [*values["queries"], values["hyde"].content])
        | PoolRetriever().map()
    )
    template = trace(chain).template
    assert template["queries.model"].splittable
    assert not template["hyde"].splittable


class Loud(StrOutputParser):
    def parse(self, text: str) -> str:
        return text.upper()


class Spy(PoolRetriever):
    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        return []


class Backwards(RunnableSequence[Any, Any]):
    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self.last.invoke(self.first.invoke(input))


class Named(RunnableParallel[Any]):
    def get_name(self, suffix: str | None = None, *, name: str | None = None) -> str:
        return "mine"


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        (Loud(), "Loud.parse"),
        (Spy(), "Spy.invoke"),
        (Backwards(PoolRetriever(), RunnableLambda(len)), "Backwards.invoke"),
        (RunnableLambda(itemgetter("a"), afunc=lambda x: x), "your code"),
        (RunnableLambda(itemgetter("a")).bind(extra=1), "bound arguments"),
        (RunnableParallel(a=itemgetter("q")) | itemgetter("b"), "does not have"),
        (RunnableParallel(a=itemgetter("q")) | ask("{b}"), "missing"),
        (RunnableParallel(a=itemgetter("q")) | PoolRetriever(), "dictionary"),
        (PoolRetriever().with_retry(), "decides at run time"),
        (PoolRetriever().with_fallbacks([PoolRetriever()]), "decides at run time"),
        (FakeListChatModel(responses=["x"]), "wrapped leaf"),
        (RunnableLambda(lambda x: PoolRetriever()), "your code"),
        (RunnableLambda(lambda x: x.pop()), "your code"),
        (RunnableLambda(lambda x: print(x)), "your code"),
    ],
)
def test_unknown_runnable_stays_opaque_with_a_reason(chain: Runnable[Any, Any], why: str) -> None:
    traced = trace(chain)
    assert any(c.role is Role.OPAQUE for c in traced.template.components)
    (node,) = [n for n in traced.report if n.components and n.level != "lowered"]
    assert why in node.reason


def test_subclasses_that_change_nothing_executed_are_lowered() -> None:
    assert _all_lowered(trace(Named(a=PoolRetriever())))
    assert _all_lowered(trace(RunnableParallel[dict[str, Any]](a=PoolRetriever())))
    assert _all_lowered(trace(MODEL.bind(stop=["x"]).with_config(tags=["t"]).with_listeners(on_end=print)))


def test_outer_bound_arguments_win() -> None:
    payload = trace(MODEL.bind(stop=["inner"]).bind(stop=["outer"])).calls["model"]({"value": "hi"})
    assert payload.sampling.stop == ("outer",)


@pytest.mark.parametrize("thing", ["chain", None, len, PoolRetriever])
def test_tracing_a_non_runnable_raises_trace_error(thing: object) -> None:
    with pytest.raises(TraceError, match="not a LangChain Runnable") as error:
        trace(thing)
    assert error.value.path == "chain" and error.value.hint


def test_tracing_runs_no_user_code_and_changes_nothing() -> None:
    def fail(value: Any) -> Any:
        raise AssertionError("ran")

    chain = (
        RunnablePassthrough.assign(x=fail) | RunnablePassthrough(fail) | RunnableLambda(fail).map() | ask("{x}") | MODEL
    )
    before = [dict(vars(step)) for step in chain.steps]  # type: ignore[attr-defined]
    trace(chain)
    assert [dict(vars(step)) for step in chain.steps] == before  # type: ignore[attr-defined]


def test_tracing_twice_gives_equal_templates() -> None:
    chain = advanced_rag()
    one, two = trace(chain), trace(chain)
    assert one.template == two.template and one.report == two.report and one.watched == two.watched


def test_chain_of_500_steps_is_traced() -> None:
    steps = [RunnablePassthrough.assign(**{f"k{i}": itemgetter("q") | PoolRetriever()}) for i in range(250)]
    steps += [RunnableLambda(with_side_effect(lambda x: x)) for _ in range(250)]
    traced = trace(RunnableSequence(*steps))
    assert len(traced.template.components) == 750
    assert len(build_pgraph(traced.template)) == 1000


def test_clashing_keys_get_distinct_primitive_names() -> None:
    chain = RunnableParallel(
        {"a": PoolRetriever(), "a.embedding": PoolRetriever(), "b": {"x": MODEL}, "b.x": MODEL, "$ ?": PoolRetriever()}
    )
    traced = trace(chain)
    names = [p.id for p in build_pgraph(traced.template)]
    assert len(set(names)) == len(names) and "____" not in names
    assert _all_lowered(traced)


def test_report_renders_as_a_table() -> None:
    report = trace(made("lambda_between")).report
    lines = str(report).splitlines()
    assert len(lines) == len(report) and lines[2].startswith("unchanged  chain.steps[0]")
    assert [n.class_name for n in report.at("original")] == ["RunnableLambda"]


def test_tracing_takes_few_function_calls() -> None:
    """Function calls, not seconds: a machine's load must not matter."""
    chain = advanced_rag()
    trace(chain)
    profile = cProfile.Profile()
    profile.runcall(trace, chain)
    assert pstats.Stats(profile).total_calls < 20_000  # type: ignore[attr-defined]
