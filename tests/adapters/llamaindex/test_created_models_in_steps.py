"""OpenAI models that steps of a workflow create: their certain calls are prefetched, and nothing else changes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import TextNode
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from support.hosted_steps import called, run_with_events
from support.openai_stub import OpenAIStub, openai_stub
from support.slow_answers import SlowAnswers

from teola_plugin import accelerate

# LlamaIndex leaves the clients of created models open; the garbage collector ends them, often in a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
LATENCY_S = 0.15
QUESTIONS = ["what grows", "what is sown", "what is reaped"]


class HostedAnswers(SlowAnswers):
    """Answers, and refuses what says that it is refused."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["messages"][-1]["content"]
        return {"status": 400} if "refused" in str(prompt) else {"content": f"answer to {prompt}"}


class Server:
    """A server, and the requests that it got from one run."""

    def __init__(self, stub: OpenAIStub, answers: HostedAnswers) -> None:
        self.stub, self.answers = stub, answers

    def requests(self) -> list[str]:
        """Return paths, bodies and credentials of the requests so far, sorted, and forget them."""
        headers = [one.get("authorization", "") for one in self.stub.headers]
        requests = [json.dumps([*request, header]) for request, header in zip(self.stub.requests, headers, strict=True)]
        self.stub.requests.clear()
        self.stub.headers.clear()
        return sorted(requests)

    def most_at_once(self) -> int:
        """Return how many requests were under way at most so far, and forget it."""
        most, self.answers.most_at_once = self.answers.most_at_once, 0
        return most


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    answers = HostedAnswers(LATENCY_S)
    with openai_stub(answers) as stub:
        monkeypatch.setenv("OPENAI_API_BASE", stub.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        yield Server(stub, answers)


def compared(make: Callable[[], Any], server: Server) -> tuple[int, int]:
    """Check that a workflow answers and sends requests as its original does, in two runs.

    Return how many of the original's requests, and of the accelerated workflow's, were under way at once.
    """
    expected = called(make())
    expected_requests, original_most = server.requests(), server.most_at_once()
    fast = accelerate(make())
    for _ in range(2):
        assert called(fast) == expected
        assert server.requests() == expected_requests
    return original_most, server.most_at_once()


class Asked(Event):
    """Questions were written."""

    questions: list[str]


class Questions(Workflow):
    """A workflow whose first step writes questions."""

    def __init__(self) -> None:
        super().__init__(timeout=60)

    @step
    async def ask(self, ctx: Context, ev: StartEvent) -> Asked:
        return Asked(questions=[f"{question} with {ev.query}" for question in QUESTIONS])


class Loop(Questions):
    @step
    async def answer(self, ctx: Context, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        answers = []
        for question in ev.questions:
            response = await llm.acomplete(f"answer {question}")
            answers.append(str(response))
        return StopEvent(result=answers)


class Chats(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0.5, max_tokens=64, additional_kwargs={"seed": 7})
        answers = []
        for question in ev.questions:
            messages = [ChatMessage(role="system", content="You answer."), ChatMessage(role="user", content=question)]
            answers.append((await llm.achat(messages)).message.content)
        return StopEvent(result=answers)


class MadeInRounds(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        answers = []
        for question in ev.questions:
            llm = OpenAI(model="gpt-4o-mini", temperature=0)
            answers.append((await llm.acomplete(question)).text)
        return StopEvent(result=answers)


def make_llm() -> OpenAI:
    return OpenAI(model="gpt-4o-mini", temperature=0.1)


class MadeByHelper(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = make_llm()
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class OneAfterTheOther(Questions):
    """Calls that need nothing of each other, of two models with different settings and of two equal ones."""

    @step
    async def answer(self, ev: Asked) -> StopEvent:
        cold, warm = OpenAI(model="gpt-4o-mini", temperature=0), OpenAI(model="gpt-4o-mini", temperature=1)
        also_cold = OpenAI(model="gpt-4o-mini", temperature=0)
        answers = [str(await cold.acomplete("same")), str(await warm.acomplete("same"))]
        answers += [str(await also_cold.acomplete("same")), str(await also_cold.acomplete("other"))]
        return StopEvent(result=answers)


class Like(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAILike(model="local", is_chat_model=True, api_key="other key", max_retries=0)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class WithoutReuse(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", reuse_client=False)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class SyncStep(Questions):
    @step
    def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        return StopEvent(result=[llm.complete(question).text for question in ev.questions])


class AcrossSteps(Workflow):
    """A call in a later step that needs nothing of the step before."""

    @step
    async def ask(self, ev: StartEvent) -> Asked:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        await llm.acomplete("first")
        return Asked(questions=QUESTIONS)

    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        return StopEvent(result=[str(await llm.acomplete("first")), str(await llm.acomplete("second"))])


class InEngine(Questions):
    """A model that is passed to an engine."""

    def __init__(self) -> None:
        super().__init__()
        nodes = [TextNode(text=f"text {number}", id_=str(number)) for number in range(2)]
        self.index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=2))

    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        engine = self.index.as_query_engine(llm=llm)
        answers = []
        for question in ev.questions:
            answers.append(str(await engine.aquery(question)))
        return StopEvent(result=answers)


@pytest.mark.parametrize("make", [Loop, Chats, MadeInRounds, MadeByHelper, Like, WithoutReuse, SyncStep])
def test_calls_of_a_created_model_run_side_by_side(make: Callable[[], Any], server: Server) -> None:
    original_most, most_at_once = compared(make, server)
    assert original_most == 1
    assert most_at_once >= 2


@pytest.mark.parametrize("make", [OneAfterTheOther, AcrossSteps])
def test_equal_prompts_of_several_models_are_sent_as_often_as_by_the_original(
    make: Callable[[], Any], server: Server
) -> None:
    original_most, most_at_once = compared(make, server)
    assert original_most == 1
    assert most_at_once >= 2


def test_a_created_model_in_an_engine_answers_as_it_does_there(server: Server) -> None:
    compared(InEngine, server)


MODEL = "gpt-4o-mini"


class NamedElsewhere(Questions):
    """A model whose settings are a global and an attribute of the workflow."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 0.25

    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(MODEL, temperature=self.temperature)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


def test_settings_are_read_again_after_they_have_changed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fast_workflow = NamedElsewhere()
    fast = accelerate(fast_workflow)
    assert compared(NamedElsewhere, server)[1] >= 2
    called(fast)
    server.requests()
    monkeypatch.setattr(f"{__name__}.MODEL", "gpt-4o")
    monkeypatch.setenv("OPENAI_API_KEY", "other key")
    fast_workflow.temperature = 0.5
    answers = called(fast)
    requests = server.requests()
    original = NamedElsewhere()
    original.temperature = 0.5
    assert called(original) == answers
    assert server.requests() == requests


# ------------------------------------------------------------ models that are not understood


class SettingsOfEvent(Questions):
    @step
    async def answer(self, ctx: Context, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=len(ev.questions) / 10)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class OwnOpenAI(OpenAI):
    """A class of the user's, which counts its objects."""

    def __init__(self, **options: Any) -> None:
        super().__init__(temperature=0.75, **options)


class OwnClass(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OwnOpenAI(model="gpt-4o-mini")
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class OwnHttpClient(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        async with httpx.AsyncClient(headers={"x-app": "fields"}) as client:
            llm = OpenAI(model="gpt-4o-mini", async_http_client=client)
            return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class OwnClient(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        client = openai.AsyncOpenAI(api_key="of the client", base_url=os.environ["OPENAI_API_BASE"])
        llm = OpenAI(model="gpt-4o-mini", async_openai_client=client)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class OwnCallbacks(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", callback_manager=CallbackManager([]))
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedEnvironment(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        os.environ["OPENAI_API_KEY"] = "key of the step"
        llm = OpenAI(model="gpt-4o-mini")
        answers = [str(await llm.acomplete(question)) for question in ev.questions]
        os.environ["OPENAI_API_KEY"] = "key"
        return StopEvent(result=answers)


class ChangedModule(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        openai.api_version = "2026-01-01"
        llm = OpenAI(model="gpt-4o-mini")
        answers = [str(await llm.acomplete(question)) for question in ev.questions]
        openai.api_version = None
        return StopEvent(result=answers)


class EarlyReturn(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini")
        for question in ev.questions:
            response = await llm.acomplete(question)
            if "sown" in response.text:
                break
        return StopEvent(result=response.text)


class WrongSettings(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        try:
            llm = OpenAI(model="gpt-4o-mini", temperature=17)
        except ValueError:
            llm = OpenAI(model="gpt-4o", temperature=1)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


@pytest.mark.parametrize(
    "make",
    [SettingsOfEvent, OwnClass, OwnHttpClient, OwnClient, OwnCallbacks, ChangedEnvironment, ChangedModule, EarlyReturn],
)
def test_calls_of_models_that_are_not_understood_stay_in_place(make: Callable[[], Any], server: Server) -> None:
    most_at_once = compared(make, server)
    assert most_at_once == (1, 1)


def test_a_patched_class_is_not_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[OpenAI] = []
    original_init = OpenAI.__init__

    def counting_init(self: OpenAI, *args: Any, **kwargs: Any) -> None:
        created.append(self)
        original_init(self, *args, **kwargs)

    monkeypatch.setattr(OpenAI, "__init__", counting_init)
    most_at_once = compared(Loop, server)
    assert most_at_once == (1, 1)
    assert len(created) == 3


def test_wrong_settings_raise_where_the_original_raises(server: Server) -> None:
    compared(WrongSettings, server)


# ------------------------------------------------------------ models that change


class ChangedInStep(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        llm.temperature = 0.9
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedBetween(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        answers = [str(await llm.acomplete("first")), str(await llm.acomplete("second"))]
        llm.additional_kwargs["seed"] = 3
        return StopEvent(result=[*answers, str(await llm.acomplete("third")), str(await llm.acomplete("fourth"))])


def warm_up(llm: OpenAI) -> None:
    llm.temperature = 0.9


class ChangedByHelper(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        warm_up(llm)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedInRounds(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        answers = []
        for question in ev.questions:
            answers.append(str(await llm.acomplete(question)))
            llm.temperature += 0.1
        return StopEvent(result=answers)


class GivenClient(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        llm._aclient = openai.AsyncOpenAI(api_key="of the client", base_url=os.environ["OPENAI_API_BASE"])
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedInBranch(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        if "first" in str(await llm.acomplete("first")):
            llm.temperature = 0.9
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedByHelperInBranch(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        if "first" in str(await llm.acomplete("first")):
            warm_up(llm)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedInTry(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        try:
            llm.temperature = float(str(await llm.acomplete("first")))
        except ValueError:
            llm.temperature = 0.3
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedWithSetattr(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0)
        setattr(llm, "temperature", 0.9)  # noqa: B010
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


class ChangedByOtherName(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llms = [OpenAI(model="gpt-4o-mini", temperature=0)]
        for llm in llms:
            llm.temperature = 0.9
        return StopEvent(result=[str(await llms[0].acomplete(question)) for question in ev.questions])


class ChangedAttribute(Questions):
    """A model in an attribute of the workflow, which the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.llm = OpenAI(model="gpt-4o-mini", temperature=0)

    @step
    async def answer(self, ev: Asked) -> StopEvent:
        self.llm.temperature = 0.9
        answers = [str(await self.llm.acomplete(question)) for question in ev.questions]
        self.llm.temperature = 0
        return StopEvent(result=answers)


@pytest.mark.parametrize(
    "make",
    [
        *(ChangedInStep, ChangedBetween, ChangedByHelper, ChangedInRounds, GivenClient, ChangedInBranch),
        *(ChangedByHelperInBranch, ChangedInTry, ChangedWithSetattr, ChangedByOtherName, ChangedAttribute),
    ],
)
def test_a_model_that_changes_sends_what_the_original_sends(make: Callable[[], Any], server: Server) -> None:
    compared(make, server)


# ------------------------------------------------------------ failures, cancellation, clients, explanations


class Refused(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", temperature=0, max_retries=0)
        prompts = [ev.questions[0], "refused", ev.questions[2]]
        return StopEvent(result=[str(await llm.acomplete(prompt)) for prompt in prompts])


class WithoutKey(Questions):
    @step
    async def answer(self, ev: Asked) -> StopEvent:
        llm = OpenAI(model="gpt-4o-mini", api_base="http://127.0.0.1:9/v1", max_retries=0, timeout=5)
        return StopEvent(result=[str(await llm.acomplete(question)) for question in ev.questions])


@pytest.mark.parametrize("make", [Refused, WithoutKey])
def test_an_error_is_the_originals(make: Callable[[], Any], server: Server) -> None:
    errors = []
    for workflow in (make(), accelerate(make())):
        with pytest.raises(Exception) as caught:
            called(workflow)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_a_cancelled_run_sends_no_more_requests(server: Server) -> None:
    fast = accelerate(Loop())

    async def run() -> None:
        handler = fast.run(query="oats")
        while not server.stub.requests:
            await asyncio.sleep(0.01)
        await handler.cancel_run()
        with pytest.raises(Exception) as caught:
            await handler
        assert "Cancelled" in type(caught.value).__name__

    asyncio.run(run())
    count = len(server.stub.requests)
    time.sleep(2 * LATENCY_S)
    assert count == len(server.stub.requests) <= len(QUESTIONS)


def test_runs_side_by_side_have_their_own_results(server: Server) -> None:
    fast = accelerate(Loop())

    async def run() -> list[Any]:
        return list(await asyncio.gather(*(run_with_events(fast, query) for query in ("oats", "rye", "oats"))))

    results = asyncio.run(run())
    expected = [
        [f"answer to answer {question} with {query}" for question in QUESTIONS] for query in ("oats", "rye", "oats")
    ]
    assert [result for result, _ in results] == expected
    assert len(server.requests()) == 3 * len(QUESTIONS)


@pytest.mark.parametrize("make", [Loop, OneAfterTheOther])
def test_at_most_one_client_more_is_made_than_by_the_original(
    make: Callable[[], Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[weakref.ref[Any]] = []
    original_init = openai.AsyncOpenAI.__init__

    def counting_init(self: Any, *args: Any, **kwargs: Any) -> None:
        clients.append(weakref.ref(self))
        original_init(self, *args, **kwargs)

    monkeypatch.setattr(openai.AsyncOpenAI, "__init__", counting_init)
    called(make())
    original_count = len(clients)
    clients.clear()
    fast = accelerate(make())
    called(fast)
    assert 1 <= len(clients) <= original_count + 1  # one for the calls that begin before the code has its own
    gc.collect()
    assert [one() for one in clients if one() is not None] == []


def test_explain_names_the_step(server: Server) -> None:
    fast = accelerate(Loop())
    assert "calls that the step answer makes one after the other, side by side" in str(fast.explain())
    assert "calls that the step answer" not in str(accelerate(OwnClass()).explain())


def test_nothing_is_prefetched_where_the_user_says_so(server: Server) -> None:
    called(accelerate(Loop(), speculate="off"))
    assert server.most_at_once() == 1
