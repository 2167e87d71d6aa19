"""Tests of loops and branches in nodes whose calls are answered with fields: certain calls are prefetched.

Each graph runs as it is and accelerated: results, errors and requests are equal, and calls that are certain overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from pydantic import BaseModel
from support.hosted_model import HostedModel

from teola_plugin import accelerate


class Verdict(BaseModel):
    """What the model says of a text."""

    is_clear: bool
    note: str


class JudgingModel(HostedModel):
    """A model that answers with a verdict: what has an "x" in it is not clear."""

    def _end(self, prompt: str) -> ChatResult:
        super()._end(prompt)
        verdict = Verdict(is_clear="x" not in prompt, note=f"verdict on {prompt}")
        return ChatResult(generations=[ChatGeneration(message=AIMessage(verdict.model_dump_json()))])


class State(TypedDict, total=False):
    """The state of the graphs."""

    topic: str
    items: list[str]
    kept: list[str]
    reply: Any
    brief: str
    first: str
    second: str


Build = Callable[[HostedModel], Any]
INPUT: State = {"topic": "oats", "items": ["a", "x", "b", "c"]}
MANY: State = {"topic": "oats", "items": [f"item {number}" for number in range(6)]}


def judge_with(model: HostedModel) -> Any:
    return model | PydanticOutputParser(pydantic_object=Verdict)


def compiled(*nodes: Any) -> Any:
    """Compile a graph of these functions, one after the other."""
    builder = StateGraph(State)
    previous = START
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    builder.add_edge(previous, END)
    return builder.compile()


def outcome_of(graph: Any, state: State) -> Any:
    """Return what the graph returns, without the ids of messages, or the error that it ends with."""
    try:
        result = graph.invoke({**state, "items": [*state["items"]]})
    except Exception as error:
        return type(error), str(error)
    return {key: getattr(value, "content", value) for key, value in result.items()}


def run_both(build: Build, state: State = INPUT, **options: Any) -> tuple[JudgingModel, Any]:
    """Check that the accelerated graph gives what the original gives. Return its model, and the graph."""
    plain, fast = (JudgingModel(**options) for _ in range(2))
    accelerated = accelerate(build(fast))

    expected = outcome_of(build(plain), state)

    assert outcome_of(accelerated, state) == expected
    if isinstance(expected, dict):
        assert fast.prompts == plain.prompts
    else:
        assert set(plain.prompts) <= set(fast.prompts)
    return fast, accelerated


# ------------------------------------------------------------ both branches use a field of an answer


def two_commands(model: HostedModel) -> Any:
    judge = judge_with(model)

    def clarify(state: State) -> Command[Literal["plan", "__end__"]]:
        verdict = judge.invoke(state["topic"])
        title = str(model.invoke(f"title of {state['topic']}").content)
        if not verdict.is_clear:
            return Command(goto=END, update={"brief": verdict.note, "first": title})
        return Command(goto="plan", update={"brief": verdict.note, "second": title})

    def plan(state: State) -> State:
        return {"reply": str(model.invoke(f"plan {state['brief']}").content)}

    builder = StateGraph(State)
    builder.add_node("clarify", clarify)
    builder.add_node("plan", plan)
    builder.add_edge(START, "clarify")
    return builder.compile()


def message_in_one_branch(model: HostedModel) -> Any:
    judge = judge_with(model)

    def clarify(state: State) -> State:
        verdict = judge.invoke(state["topic"])
        if verdict.is_clear:
            reply = AIMessage(content=verdict.note)
        else:
            reply = AIMessage(content="not clear")
        return {"reply": reply, "first": str(model.invoke(f"title of {state['topic']}").content)}

    return compiled(clarify)


@pytest.mark.parametrize("topic", ["oats", "x"])
@pytest.mark.parametrize("build", [two_commands, message_in_one_branch])
def test_branches_that_use_a_field_of_an_answer_keep_the_plan(build: Build, topic: str) -> None:
    model, _ = run_both(build, {**INPUT, "topic": topic})

    assert model.most_at_once == 2


@pytest.mark.parametrize("build", [two_commands, message_in_one_branch])
def test_failed_call_before_branches_is_the_originals_error(build: Build) -> None:
    run_both(build, fails_on="title of oats")


# ------------------------------------------------------------ a `raise` in a loop, or in one branch


def triage(model: HostedModel) -> Any:
    judge = judge_with(model)

    def keep_clear(state: State) -> State:
        kept = []
        for item in state["items"]:
            verdict = judge.invoke(f"judge {item}")
            if verdict.is_clear:
                kept.append(item)
            elif verdict.note:
                print("not clear:", item)
            else:
                raise ValueError(f"no note on {item}")
        return {"kept": kept}

    return compiled(keep_clear)


def check_each(model: HostedModel) -> Any:
    def write_each(state: State) -> State:
        texts = []
        for item in state["items"]:
            if not item:
                raise ValueError("an empty item")
            texts.append(str(model.invoke(f"write {item}").content))
        return {"kept": texts}

    return compiled(write_each)


def raise_in_else(model: HostedModel) -> Any:
    judge = judge_with(model)

    def write(state: State) -> State:
        verdict = judge.invoke(f"judge {state['topic']}")
        if verdict.is_clear:
            style = "plain"
        elif verdict.note == "none":
            style = "none"
        else:
            raise ValueError("not clear")
        return {"first": style, "second": str(model.invoke(f"write {state['topic']}").content)}

    return compiled(write)


@pytest.mark.parametrize("state", [INPUT, MANY, {**MANY, "items": []}], ids=["four", "six", "none"])
@pytest.mark.parametrize("build", [triage, check_each])
def test_rounds_of_a_loop_that_may_raise_overlap(build: Build, state: State) -> None:
    model, _ = run_both(build, state)

    assert model.most_at_once >= min(2, len(state["items"]))


def test_call_behind_a_branch_that_raises_overlaps() -> None:
    model, _ = run_both(raise_in_else)

    assert model.most_at_once == 2


@pytest.mark.parametrize(
    ("build", "state"), [(check_each, {**INPUT, "items": ["a", "", "b"]}), (raise_in_else, {**INPUT, "topic": "x"})]
)
def test_raise_ends_the_accelerated_graph_as_the_original(build: Build, state: State) -> None:
    run_both(build, state)


def test_failed_call_of_a_loop_that_may_raise_is_the_originals_error() -> None:
    run_both(triage, fails_on="judge x")


def caught_around_the_loop(model: HostedModel) -> Any:
    def write_each(state: State) -> State:
        texts: list[str] = []
        try:
            for item in state["items"]:
                if item == "x":
                    raise ValueError("stop")
                texts.append(str(model.invoke(f"write {item}").content))
        except ValueError:
            texts.append("stopped")
        return {"kept": texts}

    return compiled(write_each)


def caught_in_a_caller(model: HostedModel) -> Any:
    def write_all(items: list[str]) -> list[str]:
        texts = []
        for item in items:
            if item == "x":
                raise ValueError("stop")
            texts.append(str(model.invoke(f"write {item}").content))
        return texts

    def write_each(state: State) -> State:
        try:
            return {"kept": write_all(state["items"])}
        except ValueError:
            return {"kept": []}

    return compiled(write_each)


def caught_else(model: HostedModel) -> Any:
    judge = judge_with(model)

    def write(state: State) -> State:
        try:
            if judge.invoke(f"judge {state['topic']}").is_clear:
                text = str(model.invoke(f"write {state['topic']}").content)
            else:
                raise ValueError("not clear")
        except ValueError:
            text = ""
        return {"first": text}

    return compiled(write)


def caught_before_a_call(model: HostedModel) -> Any:
    judge = judge_with(model)

    def write(state: State) -> State:
        verdict = judge.invoke(f"judge {state['topic']}")
        try:
            if not verdict.is_clear:
                raise ValueError("not clear")
            text = str(model.invoke(f"write {state['topic']}").content)
        except ValueError:
            text = ""
        return {"first": text}

    return compiled(write)


@pytest.mark.parametrize("build", [caught_around_the_loop, caught_in_a_caller, caught_else, caught_before_a_call])
def test_no_call_is_made_behind_a_raise_that_is_caught(build: Build) -> None:
    run_both(build, {**INPUT, "topic": "x"})


# ------------------------------------------------------------ functions that ask a model, in expressions


def condition_in_a_helper(model: HostedModel) -> Any:
    judge = judge_with(model)

    def is_clear(item: str) -> bool:
        verdict = judge.invoke(f"judge {item}")
        return bool(verdict.is_clear)

    def keep_clear(state: State) -> State:
        return {"kept": [item for item in state["items"] if is_clear(item)]}

    return compiled(keep_clear)


def condition_in_a_method(model: HostedModel) -> Any:
    class Grader:
        def __init__(self) -> None:
            self.judge = judge_with(model)

        def is_clear(self, item: str) -> bool:
            return bool(self.judge.invoke(f"judge {item}").is_clear)

        def keep_clear(self, state: State) -> State:
            return {"kept": [str(model.invoke(f"write {one}").content) for one in state["items"] if self.is_clear(one)]}

    return compiled(Grader().keep_clear)


def same_question_for_each(model: HostedModel) -> Any:
    def ask(prompt: str) -> str:
        return str(model.invoke(prompt).content)

    def keep(state: State) -> State:
        kept = [item for item in state["items"] if ask("is it time?") and ask(f"keep {item}?")]
        return {"kept": kept, "first": ask("title")}

    return compiled(keep)


@pytest.mark.parametrize("state", [INPUT, MANY, {**MANY, "items": []}], ids=["four", "six", "none"])
@pytest.mark.parametrize("build", [condition_in_a_helper, condition_in_a_method])
def test_conditions_that_ask_in_a_helper_overlap(build: Build, state: State) -> None:
    model, _ = run_both(build, state)

    assert model.most_at_once >= min(2, len(state["items"]))


@pytest.mark.parametrize("state", [INPUT, {**INPUT, "items": []}], ids=["four", "none"])
def test_question_of_each_item_is_asked_as_often_as_there_are_items(state: State) -> None:
    run_both(same_question_for_each, state)


def test_failed_condition_in_a_helper_is_the_originals_error() -> None:
    run_both(condition_in_a_helper, fails_on="judge x")


def first_that_fits(model: HostedModel) -> Any:
    def find(state: State) -> State:
        return {"first": next(item for item in state["items"] if "a" in str(model.invoke(f"try {item}").content))}

    return compiled(find)


def any_that_fits(model: HostedModel) -> Any:
    def find(state: State) -> State:
        return {"reply": any("a" in str(model.invoke(f"try {item}").content) for item in state["items"])}

    return compiled(find)


def generator_that_nobody_reads(model: HostedModel) -> Any:
    def find(state: State) -> State:
        answers = (model.invoke(f"try {item}") for item in state["items"])
        return {"first": type(answers).__name__}

    return compiled(find)


def helper_behind_and(model: HostedModel) -> Any:
    def ask(prompt: str) -> str:
        return str(model.invoke(prompt).content)

    def write(state: State) -> State:
        verdict = ask("judge")
        return {"reply": "no such text" in verdict and ask("write"), "first": ask("title")}

    return compiled(write)


def helper_in_a_conditional(model: HostedModel) -> Any:
    def ask(prompt: str) -> str:
        return str(model.invoke(prompt).content)

    def write(state: State) -> State:
        verdict = ask("judge")
        return {"reply": ask("write") if "no such text" in verdict else "nothing", "first": ask("title")}

    return compiled(write)


NOT_CERTAIN = [
    first_that_fits,
    any_that_fits,
    generator_that_nobody_reads,
    helper_behind_and,
    helper_in_a_conditional,
]


@pytest.mark.parametrize("build", NOT_CERTAIN)
def test_no_call_is_made_that_an_expression_leaves_out(build: Build) -> None:
    run_both(build)


@pytest.mark.parametrize("build", [helper_behind_and, helper_in_a_conditional])
def test_call_behind_an_expression_that_may_ask_is_prefetched(build: Build) -> None:
    model, _ = run_both(build)

    assert model.most_at_once == 2


def generators_read_to_the_end(model: HostedModel) -> Any:
    def write(state: State) -> State:
        texts = list(str(model.invoke(f"write {item}").content) for item in state["items"])
        return {"kept": texts, "first": ", ".join(str(model.invoke(f"name {item}").content) for item in texts)}

    return compiled(write)


def test_generators_that_are_read_to_the_end_overlap() -> None:
    model, _ = run_both(generators_read_to_the_end)

    assert model.most_at_once > 1


# ------------------------------------------------------------ counters


def counter_in_prompts(model: HostedModel) -> Any:
    def write(state: State) -> State:
        number, width, texts = 0, 10, []
        for item in state["items"]:
            number += 1  # noqa: SIM113
            texts.append(str(model.invoke(f"write part {number} ({width}): {item}").content))
            width += 5
        return {"kept": texts}

    return compiled(write)


@pytest.mark.parametrize("state", [INPUT, MANY, {**MANY, "items": []}], ids=["four", "six", "none"])
def test_rounds_whose_prompts_count_overlap(state: State) -> None:
    model, _ = run_both(counter_in_prompts, state)

    assert model.most_at_once >= min(2, len(state["items"]))


def test_failed_round_of_a_counting_loop_is_the_originals_error() -> None:
    run_both(counter_in_prompts, fails_on="write part 2")


def counter_behind_continue(model: HostedModel) -> Any:
    def write(state: State) -> State:
        number, texts = 0, []
        for item in state["items"]:
            if item == "x":
                continue
            number += 1
            texts.append(str(model.invoke(f"write part {number}: {item}").content))
        return {"kept": texts}

    return compiled(write)


def counter_of_an_inner_function(model: HostedModel) -> Any:
    def write(state: State) -> State:
        number, texts = 0, []

        def skip() -> None:
            nonlocal number
            number += 10

        for item in state["items"]:
            skip()
            number += 1
            texts.append(str(model.invoke(f"write part {number}: {item}").content))
        return {"kept": texts}

    return compiled(write)


def counter_that_is_reset(model: HostedModel) -> Any:
    def write(state: State) -> State:
        number, texts = 0, []
        for item in state["items"]:
            number += 1
            texts.append(str(model.invoke(f"write part {number}: {item}").content))
            if item == "x":
                number = 0
        return {"kept": texts, "first": str(model.invoke(f"title of {number} parts").content)}

    return compiled(write)


def items_changed_in_a_counting_loop(model: HostedModel) -> Any:
    def write(state: State) -> State:
        number, texts = 0, []
        rows = [[item] for item in state["items"]]
        for row in rows:
            number += 1  # noqa: SIM113
            row.append(f"row {number}")
            texts.append(str(model.invoke(f"write part {number}").content))
        return {"kept": texts, "first": str(model.invoke(f"title of {rows}").content)}

    return compiled(write)


@pytest.mark.parametrize("build", [counter_behind_continue, counter_of_an_inner_function, counter_that_is_reset])
def test_counter_that_does_not_count_rounds_is_not_known(build: Build) -> None:
    run_both(build)


def test_items_that_a_counting_loop_changes_are_not_known_behind_it() -> None:
    run_both(items_changed_in_a_counting_loop)


# ------------------------------------------------------------ the report lists the calls of conditional edges


def asking_router(model: HostedModel) -> Any:
    def write(state: State) -> State:
        return {"first": "a text"}

    def choose(state: State) -> str:
        grounded = str(model.invoke(f"grounded: {state['first']}?").content)
        useful = str(model.invoke(f"useful for {state['topic']}?").content)
        return "rewrite" if "x" in grounded + useful else END

    builder = StateGraph(State)
    builder.add_node("write", write)
    builder.add_node("rewrite", lambda state: {"first": "another text"})
    builder.add_edge(START, "write")
    builder.add_conditional_edges("write", choose, ["rewrite", END])
    return builder.compile()


def test_report_lists_calls_of_a_conditional_edge() -> None:
    model, accelerated = run_both(asking_router)

    report = accelerated.report()

    starts = {call.name: call.start for call in report.calls}
    assert model.most_at_once == 2
    assert starts == {"write.next.model": "", "write.next.model2": "when its node begins"}
    assert "no gain" not in report.expect


def test_report_of_a_failed_conditional_edge_lists_its_calls() -> None:
    _, accelerated = run_both(asking_router, fails_on="useful")

    assert len(accelerated.report().calls) == 2
