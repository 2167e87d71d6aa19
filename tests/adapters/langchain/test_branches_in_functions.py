"""Tests of branches, conditions and loops in functions: what is certain of them, and behind them, is prefetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from differential.recording import observe
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBranch, RunnableConfig, RunnableLambda
from support.hosted_model import HostedModel

from teola_plugin import accelerate

Build = Callable[[Any], Runnable[Any, Any]]
WITHOUT_HISTORY: dict[str, Any] = {"input": "oats", "chat_history": []}
WITH_HISTORY: dict[str, Any] = {"input": "oats", "chat_history": [HumanMessage("hello")]}
INPUTS = (WITHOUT_HISTORY, WITH_HISTORY)


class Notes(BaseRetriever):
    """Finds one note on anything."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(f"a note on {query}")]


def ask(template: str, model: Any) -> Runnable[Any, str]:
    return ChatPromptTemplate.from_template(template) | model | StrOutputParser()


def choose(model: Any) -> RunnableBranch[Any, Any]:
    return RunnableBranch(
        (lambda x: len(x["chat_history"]) > 0, ask("continue {input}", model)), ask("begin {input}", model)
    )


def behind(chain: Runnable[Any, Any], model: Any) -> Runnable[Any, Any]:
    """Return a function that calls the chain, and then a model with a prompt of its own."""

    def answer(inputs: dict[str, Any]) -> Any:
        first = chain.invoke({"input": inputs["input"], "chat_history": inputs["chat_history"]})
        return [first, model.invoke(f"title of {inputs['input']}").content]

    async def answer_on_loop(inputs: dict[str, Any]) -> Any:
        first = await chain.ainvoke({"input": inputs["input"], "chat_history": inputs["chat_history"]})
        return [first, (await model.ainvoke(f"title of {inputs['input']}")).content]

    return RunnableLambda(answer, afunc=answer_on_loop)


def branch(model: Any) -> Runnable[Any, Any]:
    return behind(choose(model), model)


def branch_in_a_sequence(model: Any) -> Runnable[Any, Any]:
    return behind(choose(model).with_config(run_name="choose") | ask("shorten {text}", model), model)


def branch_with_three_arms(model: Any) -> Runnable[Any, Any]:
    chain = RunnableBranch(
        (lambda x: x["input"] == "rye", ask("on rye {input}", model)),
        (lambda x: not x["chat_history"], lambda x: "nothing yet"),
        ask("continue {input}", model),
    )
    return behind(chain, model)


def history_aware_retriever(model: Any) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "rewrite {input}")])
    return behind(create_history_aware_retriever(model, Notes(), prompt), model)


def retrieval_chain(model: Any) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "rewrite {input}")])
    answer = create_stuff_documents_chain(model, ChatPromptTemplate.from_template("answer {input} by {context}"))
    return behind(create_retrieval_chain(create_history_aware_retriever(model, Notes(), prompt), answer), model)


GAINING: dict[str, Build] = {
    one.__name__: one
    for one in (branch, branch_in_a_sequence, branch_with_three_arms, history_aware_retriever, retrieval_chain)
}


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
@pytest.mark.parametrize("build", GAINING.values(), ids=GAINING)
def test_calls_behind_a_branch_overlap_it(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    original, accelerated = build(plain), accelerate(build(fast))

    for inputs in INPUTS:
        assert observe(accelerated, way, inputs) == observe(original, way, inputs)

    assert fast.prompts == plain.prompts
    assert plain.most_at_once == 1
    assert fast.most_at_once == 2


@pytest.mark.parametrize("build", GAINING.values(), ids=GAINING)
def test_failing_arm_raises_the_originals_error(build: Build) -> None:
    plain, fast = HostedModel(fails_on="oats"), HostedModel(fails_on="oats")

    for inputs in INPUTS:
        assert observe(accelerate(build(fast)), "invoke", inputs) == observe(build(plain), "invoke", inputs)

    assert set(plain.prompts) <= set(fast.prompts)


# ------------------------------------------------------------ what is not certain


def condition_that_raises(model: Any) -> Runnable[Any, Any]:
    return behind(RunnableBranch((lambda x: x["absent"], ask("a {input}", model)), ask("b {input}", model)), model)


def condition_by_its_own_code(model: Any) -> Runnable[Any, Any]:
    def is_short(inputs: Any) -> bool:
        with open("/dev/null") as file:
            return bool(file.read())

    return behind(RunnableBranch((is_short, ask("a {input}", model)), ask("b {input}", model)), model)


def condition_by_config(model: Any) -> Runnable[Any, Any]:
    def is_wanted(inputs: Any, config: RunnableConfig) -> bool:
        return bool(config.get("tags"))

    return behind(RunnableBranch((is_wanted, ask("a {input}", model)), ask("b {input}", model)), model)


class Contrary(RunnableBranch[Any, Any]):
    """Calls the default in any case."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self.default.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await self.default.ainvoke(input, config, **kwargs)


def subclass(model: Any) -> Runnable[Any, Any]:
    return behind(Contrary((lambda x: True, ask("a {input}", model)), ask("b {input}", model)), model)


UNCERTAIN: dict[str, Build] = {
    one.__name__: one for one in (condition_that_raises, condition_by_its_own_code, condition_by_config, subclass)
}


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("build", UNCERTAIN.values(), ids=UNCERTAIN)
def test_no_call_of_an_uncertain_branch_is_made_that_the_original_does_not_make(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    original, accelerated = build(plain), accelerate(build(fast))

    for inputs in INPUTS:
        assert observe(accelerated, way, inputs) == observe(original, way, inputs)

    extra = [] if build is not condition_that_raises else [f"title of {inputs['input']}" for inputs in INPUTS]
    assert sorted({*fast.prompts} - {*extra}) == sorted({*plain.prompts})
    assert len(fast.prompts) <= len(plain.prompts) + len(extra)


# ------------------------------------------------------------ choices behind a model's answer


def test_calls_of_one_side_overlap_once_an_answer_has_chosen_it() -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def answer(inputs: dict[str, Any]) -> Any:
            reply, note = model.invoke(f"draft {inputs['input']}").content, ""
            if model.invoke(f"grade {reply}").content != "good":
                reply = model.invoke(f"revise {reply}").content
                note = model.invoke(f"note on {inputs['input']}").content
            return [reply, note]

        return RunnableLambda(answer)

    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), "invoke", WITH_HISTORY)

    result = observe(accelerate(build(fast)), "invoke", WITH_HISTORY)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert (plain.most_at_once, fast.most_at_once) == (1, 2)


# ------------------------------------------------------------ loops that stop early


def revise_until_good(model: Any) -> Runnable[Any, Any]:
    draft, grade, revise = (ask(f"{word} {{input}}", model) for word in ("draft", "grade", "revise"))

    def answer(inputs: dict[str, Any]) -> Any:
        reply = draft.invoke(inputs)
        for _ in range(3):
            if "answer" in grade.invoke({"input": reply}):
                break
            reply = revise.invoke({"input": reply})
        return [reply, model.invoke(f"title of {inputs['input']}").content]

    return RunnableLambda(answer)


class Editor:
    """Drafts, grades and revises by methods of its own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def _grade(self, reply: str) -> str:
        return str(self._model.invoke(f"grade {reply}").content)

    def answer(self, inputs: dict[str, Any]) -> Any:
        reply, rounds = self._model.invoke(f"draft {inputs['input']}").content, 0
        while rounds < 3:
            if self._grade(reply) != "bad":
                break
            reply, rounds = self._model.invoke(f"revise {reply}").content, rounds + 1
        return [reply, self._model.invoke(f"title of {inputs['input']}").content]


def revise_by_methods(model: Any) -> Runnable[Any, Any]:
    return RunnableLambda(Editor(model).answer)


def revise_on_loop(model: Any) -> Runnable[Any, Any]:
    draft, grade, revise = (ask(f"{word} {{input}}", model) for word in ("draft", "grade", "revise"))

    async def answer(inputs: dict[str, Any]) -> Any:
        reply = await draft.ainvoke(inputs)
        for _ in range(3):
            verdict = await grade.ainvoke({"input": reply})
            if "answer" in verdict:
                break
            reply = await revise.ainvoke({"input": reply})
        return [reply, (await model.ainvoke(f"title of {inputs['input']}")).content]

    return RunnableLambda(lambda inputs: None, afunc=answer)


LOOPS: dict[str, tuple[Build, str]] = {
    "chains": (revise_until_good, "invoke"),
    "methods": (revise_by_methods, "invoke"),
    "coroutines": (revise_on_loop, "ainvoke"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_calls_behind_a_loop_that_stops_early_overlap_it(name: str) -> None:
    build, way = LOOPS[name]
    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), way, WITH_HISTORY)

    result = observe(accelerate(build(fast)), way, WITH_HISTORY)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert (plain.most_at_once, fast.most_at_once) == (1, 2)


@pytest.mark.parametrize("name", LOOPS)
def test_error_in_a_loop_that_stops_early_is_the_originals(name: str) -> None:
    build, way = LOOPS[name]
    plain, fast = HostedModel(fails_on="grade"), HostedModel(fails_on="grade")

    assert observe(accelerate(build(fast)), way, WITH_HISTORY) == observe(build(plain), way, WITH_HISTORY)


def loop_with_its_own_code(model: Any) -> Runnable[Any, Any]:
    def is_good(reply: str) -> bool:
        with open("/dev/null") as file:
            return not file.read()

    def answer(inputs: dict[str, Any]) -> Any:
        reply = model.invoke(f"draft {inputs['input']}").content
        for _ in range(3):
            if is_good(reply):
                break
            reply = model.invoke(f"revise {reply}").content
        return [reply, model.invoke(f"title of {inputs['input']}").content]

    return RunnableLambda(answer)


def loop_that_fills_a_list(model: Any) -> Runnable[Any, Any]:
    def note(notes: list[str], reply: str) -> None:
        notes.append(reply)

    def answer(inputs: dict[str, Any]) -> Any:
        notes = ["first"]
        for number in range(3):
            if "2" in model.invoke(f"grade {inputs['input']} {number}").content:
                break
            note(notes, f"note {number}")
        return model.invoke(f"sum up {', '.join(notes)}").content

    return RunnableLambda(answer)


@pytest.mark.parametrize("build", [loop_with_its_own_code, loop_that_fills_a_list])
def test_requests_behind_a_loop_that_changes_something_are_the_originals(build: Build) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = observe(build(plain), "invoke", WITH_HISTORY)

    result = observe(accelerate(build(fast)), "invoke", WITH_HISTORY)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 1
