"""Tests of functions in chains that call own models: certain calls are prefetched, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from differential.recording import observe
from langchain.chat_models import init_chat_model
from langchain_core.documents import Document
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnablePassthrough, chain
from langchain_openai import ChatOpenAI
from langchain_text_splitters import RecursiveCharacterTextSplitter
from pydantic import BaseModel
from support.hosted_model import LATENCY_S, HostedModel
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from support.slow_answers import SlowAnswers

from teola_plugin import accelerate

Build = Callable[[Any], Runnable[Any, Any]]
INPUT = {"topic": "oats", "items": ["a", "b", "c"]}
WAYS = ("invoke", "ainvoke", "stream", "astream", "batch", "events")


def ask(template: str, model: Any) -> Runnable[Any, str]:
    return ChatPromptTemplate.from_template(template) | model | StrOutputParser()


def loop(model: Any) -> Runnable[Any, Any]:
    def take_notes(inputs: dict[str, Any]) -> list[str]:
        notes = []
        for item in inputs["items"]:
            note = ask("note {item}", model).invoke({"item": item})
            notes.append(f"- {note}")
        return notes

    return RunnableLambda(take_notes)


def comprehension_then_a_summary(model: Any) -> Runnable[Any, Any]:
    def summarize(inputs: dict[str, Any]) -> str:
        notes = [model.invoke(f"note {item}").content for item in inputs["items"] if len(item) > 0]
        return str(model.invoke("summarize " + ", ".join(map(str, notes))).content)

    return RunnableLambda(summarize)


def behind_a_prompt(model: Any) -> Runnable[Any, Any]:
    def ask_twice(prompt: Any) -> list[Any]:
        return [model.invoke(prompt).content, model.invoke("check oats").content]

    return ChatPromptTemplate.from_template("plan {topic}") | ask_twice


def in_a_dictionary(model: Any) -> Runnable[Any, Any]:
    def take_notes(inputs: dict[str, Any]) -> list[Any]:
        return [model.invoke(f"note {item}").content for item in inputs["items"]]

    return RunnablePassthrough.assign(notes=take_notes) | ask("write from {notes}", model)


def decorated(model: Any) -> Runnable[Any, Any]:
    @chain
    def plan_and_note(inputs: dict[str, Any]) -> str:
        plan = ask("plan {topic}", model).invoke(inputs)
        note = ask("note {topic}", model).invoke(inputs)
        return plan + note

    return plan_and_note


def _check(model: Any, rule: str, topic: str) -> bool:
    return "no" not in str(model.invoke(f"is {topic} {rule}?").content).split()[:1]


def helper_of_a_helper(model: Any) -> Runnable[Any, Any]:
    check = partial(_check, model)

    def check_all(inputs: dict[str, Any]) -> str:
        results = {rule: check(rule, inputs["topic"]) for rule in ("kind", "brief")}
        return f"{results}: {model.invoke('answer ' + inputs['topic']).content}"

    return RunnableLambda(check_all)


class Writer:
    """Holds a model, and has a method that a chain calls."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def write(self, inputs: dict[str, Any]) -> list[str]:
        return [self._ask(kind, inputs["topic"]) for kind in ("plan", "note")]

    def _ask(self, kind: str, topic: str) -> str:
        return str(self.model.invoke(f"{kind} {topic}").content)


def method(model: Any) -> Runnable[Any, Any]:
    return RunnableLambda(Writer(model).write)


def batch(model: Any) -> Runnable[Any, Any]:
    def take_notes(inputs: dict[str, Any]) -> list[Any]:
        plan = model.invoke(f"plan {inputs['topic']}").content
        return [plan, *ask("note {item}", model).batch([{"item": item} for item in inputs["items"]])]

    return RunnableLambda(take_notes)


def two_forms(model: Any) -> Runnable[Any, Any]:
    def take_notes(inputs: dict[str, Any]) -> list[Any]:
        return [model.invoke(f"note {item}").content for item in inputs["items"]]

    async def atake_notes(inputs: dict[str, Any]) -> list[Any]:
        return [(await model.ainvoke(f"list {item}")).content for item in inputs["items"]]

    return RunnableLambda(take_notes, afunc=atake_notes)


def behind_a_model(model: Any) -> Runnable[Any, Any]:
    def take_notes(inputs: dict[str, Any]) -> str:
        notes = []
        for line in inputs["plan"].split():
            notes.append(str(model.invoke(f"note {line}").content))
        return "; ".join(notes)

    return RunnablePassthrough.assign(plan=ask("plan {topic}", model)) | take_notes | ask("write {all}", model)


GAINING: dict[str, Build] = {
    build.__name__: build
    for build in (
        loop,
        comprehension_then_a_summary,
        behind_a_prompt,
        in_a_dictionary,
        decorated,
        helper_of_a_helper,
        method,
        batch,
        two_forms,
    )
}


async def _events(app: Runnable[Any, Any], input: Any, config: Any) -> Any:
    events = [event async for event in app.astream_events(input, config, version="v2")]
    return sorted((event["event"], event["name"], sorted(event["tags"])) for event in events)


def outcome_of(app: Runnable[Any, Any], way: str, input: Any = None) -> Any:
    """Return the result, the events and the prompts of a call."""
    input = INPUT if input is None else input
    if way == "events":
        return observe(app, way, input, lambda app, input, config: asyncio.run(_events(app, input, config)))
    return observe(app, way, input)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", GAINING.values(), ids=GAINING)
def test_certain_calls_of_a_function_run_concurrently(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    at_once_before = 3 if way == "batch" else 1
    if build is batch:
        at_once_before *= 3
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert plain.most_at_once <= at_once_before < fast.most_at_once


def test_function_after_a_model_gets_the_answer_of_the_model() -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(behind_a_model(plain), "invoke")

    result = outcome_of(accelerate(behind_a_model(fast)), "invoke")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 4


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_function_not_run_by_the_entry_point_makes_no_call(way: str) -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        async def pass_on(inputs: dict[str, Any]) -> Any:
            return inputs["topic"]

        def ask(inputs: dict[str, Any]) -> list[Any]:
            return [model.invoke(f"{kind} {inputs['topic']}").content for kind in ("plan", "note")]

        return RunnableLambda(ask, afunc=pass_on) | RunnableLambda(lambda value: value)

    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == (2 if way == "invoke" else 0)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_functions_for_both_entry_points_that_share_a_coroutine_make_each_call_once(way: str) -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        async def take_notes(inputs: dict[str, Any]) -> list[Any]:
            notes = [await model.ainvoke(f"note {item}") for item in inputs["items"]]
            checks = [await model.ainvoke(f"check {item}") for item in inputs["items"]]
            return [answer.content for answer in (*notes, *checks)]

        def run_take_notes(inputs: dict[str, Any]) -> list[Any]:
            return asyncio.run(take_notes(inputs))

        return RunnableLambda(run_take_notes, afunc=take_notes)

    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert way == "invoke" or fast.most_at_once == 6


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_iterator_that_is_gone_through_twice_has_no_items_left(way: str) -> None:
    def build(model: Any) -> Runnable[Any, Any]:
        def take_notes(inputs: dict[str, Any]) -> list[Any]:
            numbered = enumerate(inputs["items"])
            notes = [model.invoke(f"note {number} {item}").content for number, item in numbered]
            checks = [model.invoke(f"check {number} {item}").content for number, item in numbered]
            return [*notes, *checks]

        return RunnableLambda(take_notes)

    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts == ["note 0 a", "note 1 b", "note 2 c"]
    assert fast.most_at_once == 3


def test_explain_names_the_loop_of_a_function() -> None:
    assert (
        "each model call of take_notes.each together with those of the other items"
        in accelerate(loop(HostedModel())).explain()
    )


# ------------------------------------------------------------ coroutine functions


def async_loop(model: Any) -> Runnable[Any, Any]:
    async def take_notes(inputs: dict[str, Any]) -> list[Any]:
        notes = []
        for item in inputs["items"]:
            reply = await model.ainvoke(f"note {item}")
            notes.append(reply.content)
        return notes

    return RunnableLambda(take_notes)


def async_gather(model: Any) -> Runnable[Any, Any]:
    async def take_notes(inputs: dict[str, Any]) -> list[Any]:
        plan = await model.ainvoke(f"plan {inputs['topic']}")
        notes = await asyncio.gather(*(model.ainvoke(f"note {item}") for item in inputs["items"]))
        return [plan.content, *(note.content for note in notes)]

    return RunnableLambda(take_notes)


@pytest.mark.parametrize("way", ["ainvoke", "astream", "events"])
@pytest.mark.parametrize("build", [async_loop, async_gather])
def test_calls_of_coroutine_functions_run_concurrently(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once > plain.most_at_once


def test_cancelled_call_leaves_no_call_running() -> None:
    model = HostedModel()
    app = accelerate(async_loop(model))

    async def cancel() -> None:
        task = asyncio.create_task(app.ainvoke(INPUT))
        await asyncio.sleep(LATENCY_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.02)

    asyncio.run(cancel())
    assert model._running == 0


# ------------------------------------------------------------ calls that are not certain


def decided_by_an_answer(model: Any) -> Runnable[Any, Any]:
    def choose(inputs: dict[str, Any]) -> Any:
        verdict = model.invoke(f"judge {inputs['topic']}").content
        return verdict if "oats" in verdict else model.invoke(f"rewrite {inputs['topic']}").content

    return RunnableLambda(choose)


def behind_code_of_its_own(model: Any) -> Runnable[Any, Any]:
    written: list[str] = []

    def write_down(inputs: dict[str, Any]) -> Any:
        written.append(inputs["topic"])
        return model.invoke(f"seen before: {bool(written)}").content

    return RunnableLambda(write_down)


def left_early(model: Any) -> Runnable[Any, Any]:
    def find(inputs: dict[str, Any]) -> Any:
        for item in inputs["items"]:
            answer = model.invoke(f"try {item}").content
            if "a" in answer:
                return answer
        return ""

    return RunnableLambda(find)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [decided_by_an_answer, behind_code_of_its_own, left_early])
def test_no_call_is_made_that_the_original_does_not_make(build: Build, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts


def test_changed_closure_data_is_read_in_the_next_call() -> None:
    kinds = ["plan", "note"]

    def build(model: Any) -> Runnable[Any, Any]:
        def ask_all(topic: str) -> list[Any]:
            return [model.invoke(f"{kind} {topic}").content for kind in kinds]

        return RunnableLambda(ask_all)

    model = HostedModel()
    app = accelerate(build(model))
    app.invoke("oats")
    kinds[:] = ["list", "sum"]

    app.invoke("rye")

    assert model.prompts == ["list rye", "note oats", "plan oats", "sum rye"]
    assert model.most_at_once == 2


# ------------------------------------------------------------ failures


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [loop, in_a_dictionary])
def test_error_of_a_prefetched_call_is_the_originals(build: Build, way: str) -> None:
    expected = outcome_of(build(HostedModel(fails_on="note b")), way)

    result = outcome_of(accelerate(build(HostedModel(fails_on="note b"))), way)

    assert "refused: note b" in result.result
    assert result.result == expected.result


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
def test_function_makes_no_call_if_an_earlier_step_raises(way: str) -> None:
    def ask_twice(inputs: Any) -> list[Any]:
        return [model.invoke("plan oats").content, model.invoke("note oats").content]

    model = HostedModel()
    parsed = ChatPromptTemplate.from_template("plan {topic}") | HostedModel() | JsonOutputParser()
    app = parsed | RunnableLambda(ask_twice)
    expected = outcome_of(app, way)

    result = outcome_of(accelerate(app), way)

    assert result == expected
    assert result.failed
    assert model.prompts == []


def test_step_after_a_function_raises_the_originals_error() -> None:
    def refuse(notes: list[str]) -> None:
        raise PermissionError(", ".join(notes))

    def build(model: Any) -> Runnable[Any, Any]:
        return loop(model) | RunnableLambda(refuse)

    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), "invoke")

    result = outcome_of(accelerate(build(fast)), "invoke")

    assert result == expected
    assert fast.prompts == plain.prompts


# ------------------------------------------------------------ requests on a server


class Answers(SlowAnswers):
    """Answers as text, or as JSON where a request asks for it."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        text = f"answer to {body['messages'][-1]['content']}"
        return {"content": json.dumps({"text": text}) if "response_format" in body else text}


answers = Answers(LATENCY_S)


@pytest.fixture(scope="module")
def stub() -> Iterator[OpenAIStub]:
    with openai_stub(answers) as server:
        yield server


def requests_of(stub: OpenAIStub, app: Any, way: str) -> tuple[str, list[str], int]:
    """Return the result of a call, the bodies that the server got, and how many it answered at the same time."""
    stub.requests.clear()
    answers.most_at_once = 0
    result = outcome_of(app, way).result
    time.sleep(0.03)
    return result, sorted(map(str, stub.generations)), answers.most_at_once


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [loop, comprehension_then_a_summary, in_a_dictionary, behind_a_model])
def test_server_gets_the_requests_of_the_original(stub: OpenAIStub, build: Build, way: str) -> None:
    model = ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0)  # type: ignore[arg-type]
    expected = requests_of(stub, build(model), way)

    result = requests_of(stub, accelerate(build(model)), way)

    assert result[:2] == expected[:2]
    assert result[2] > expected[2]


# ------------------------------------------------------------ models that a function creates


class Note(BaseModel):
    """A note."""

    text: str


def load_chat_model(name: str, base_url: str) -> Any:
    provider, model = name.split("/", maxsplit=1)
    return init_chat_model(model, model_provider=provider, base_url=base_url, api_key="k")


CREATED: dict[str, Callable[[str], Any]] = {
    "ChatOpenAI": lambda url: ChatOpenAI(base_url=url, api_key="k", model=MODEL, temperature=0.0),  # type: ignore[arg-type]
    "init_chat_model": lambda url: init_chat_model(MODEL, model_provider="openai", base_url=url, api_key="k"),
    "init_chat_model, provider in the name": lambda url: init_chat_model(f"openai:{MODEL}", base_url=url, api_key="k"),
    "a helper": lambda url: load_chat_model(f"openai/{MODEL}", url),
    "structured output": lambda url: init_chat_model(
        MODEL, model_provider="openai", base_url=url, api_key="k"
    ).with_structured_output(Note),
}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "events"])
@pytest.mark.parametrize("name", CREATED)
def test_calls_of_a_model_that_a_function_creates_are_prefetched(stub: OpenAIStub, name: str, way: str) -> None:
    create, url = CREATED[name], stub.base_url

    def take_notes(inputs: dict[str, Any]) -> list[Any]:
        model = create(url)
        return [model.invoke(f"note {item}") for item in inputs["items"]]

    app = RunnableLambda(take_notes)
    expected = requests_of(stub, app, way)

    result = requests_of(stub, accelerate(app), way)

    assert result[:2] == expected[:2]
    assert expected[2] == 1
    assert result[2] == 3


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_model_that_depends_on_call_config_is_not_prefetched(stub: OpenAIStub, way: str) -> None:
    url = stub.base_url

    def take_notes(inputs: dict[str, Any], config: RunnableConfig) -> list[Any]:
        model = init_chat_model(model_provider="openai", base_url=url, api_key="k", configurable_fields=("model",))
        return [model.invoke(f"note {item}", config).content for item in inputs["items"]]

    app = RunnableLambda(take_notes).with_config(configurable={"model": MODEL})
    expected = requests_of(stub, app, way)

    result = requests_of(stub, accelerate(app), way)

    assert result == expected


# ------------------------------------------------------------ text splitters


def chunks_of_a_text(model: Any) -> Runnable[Any, Any]:
    splitter = RecursiveCharacterTextSplitter(chunk_size=12, chunk_overlap=0)

    def summarize(inputs: dict[str, Any]) -> list[Any]:
        chunks = splitter.split_text(f"{inputs['topic']} and wheat and barley and rye")
        summaries = []
        for number, chunk in enumerate(chunks):
            print("chunk", number + 1, "of", len(chunks))
            summaries.append(model.invoke(f"sum {chunk}").content)
        return summaries

    return RunnableLambda(summarize)


def chunks_of_documents(model: Any) -> Runnable[Any, Any]:
    def summarize(inputs: dict[str, Any]) -> list[Any]:
        splitter = RecursiveCharacterTextSplitter(chunk_size=12, chunk_overlap=0)
        document = Document(page_content=f"{inputs['topic']} and wheat and rye", metadata={"topic": inputs["topic"]})
        documents = [document, Document(page_content="barley, and so on, and so on")]
        return [model.invoke(f"sum {one.page_content}").content for one in splitter.split_documents(documents)]

    return RunnableLambda(summarize)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "events"])
@pytest.mark.parametrize("build", [chunks_of_a_text, chunks_of_documents])
def test_calls_for_chunks_of_a_splitter_overlap(build: Build, way: str) -> None:
    plain, fast = HostedModel(latency_s=0.01), HostedModel(latency_s=3 * LATENCY_S)
    expected = outcome_of(build(plain), way)

    result = outcome_of(accelerate(build(fast)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert plain.most_at_once == 1 < fast.most_at_once


def splitter_that_measures_by_code(model: Any) -> Runnable[Any, Any]:
    def length(text: str) -> int:
        return len(text)

    splitter = RecursiveCharacterTextSplitter(chunk_size=12, chunk_overlap=0, length_function=length)

    def summarize(inputs: dict[str, Any]) -> list[Any]:
        return [model.invoke(f"sum {one}").content for one in splitter.split_text(f"{inputs['topic']} and wheat")]

    return RunnableLambda(summarize)


def splitter_of_another_class(model: Any) -> Runnable[Any, Any]:
    class Splitter(RecursiveCharacterTextSplitter):
        def split_text(self, text: str) -> list[str]:
            return super().split_text(text.upper())

    splitter = Splitter(chunk_size=12, chunk_overlap=0)

    def summarize(inputs: dict[str, Any]) -> list[Any]:
        return [model.invoke(f"sum {one}").content for one in splitter.split_text(f"{inputs['topic']} and wheat")]

    return RunnableLambda(summarize)


def long_text(model: Any) -> Runnable[Any, Any]:
    splitter = RecursiveCharacterTextSplitter(chunk_size=150_000, chunk_overlap=0)

    def summarize(inputs: dict[str, Any]) -> list[Any]:
        chunks = splitter.split_text(f"{inputs['topic']} " * 50_000)
        return [model.invoke(f"sum {one[:4]} {len(one)}").content for one in chunks]

    return RunnableLambda(summarize)


@pytest.mark.parametrize("build", [splitter_that_measures_by_code, splitter_of_another_class, long_text])
def test_calls_for_unpredictable_chunks_are_not_prefetched(build: Build) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = outcome_of(build(plain), "invoke")

    result = outcome_of(accelerate(build(fast)), "invoke")

    assert result == expected
    assert fast.prompts == plain.prompts
    assert len(plain.prompts) > 1
    assert fast.most_at_once == 1
