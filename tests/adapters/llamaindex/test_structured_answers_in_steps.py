"""Tests of workflow steps that ask for structured answers: certain calls are prefetched, and nothing else changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAI
from pydantic import BaseModel, Field, field_validator
from support.hosted_steps import HostedLLM, called
from support.openai_stub import OpenAIStub, openai_stub
from support.slow_answers import SlowAnswers

from teola_plugin import accelerate

LATENCY_S = 0.15
ROLES = ["manager", "engineer", "designer"]
TEMPLATE = PromptTemplate("As a {role}, comment on {query}")


class Source(BaseModel):
    """Where a claim is from."""

    title: str


class Claim(BaseModel):
    """A claim."""

    text: str
    sources: list[Source] = Field(default_factory=list)


class CheckedClaim(BaseModel):
    """A claim that code of the user's checks."""

    text: str

    @field_validator("text")
    @classmethod
    def shorten(cls, text: str) -> str:
        return text[:100]


class NumberedClaim(BaseModel):
    """A claim with a number that is new for each object."""

    text: str
    number: int = Field(default_factory=time.perf_counter_ns)


class Answers(SlowAnswers):
    """Answers with claims, as text or as calls of tools."""

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = str(body["messages"][-1]["content"])
        if "refused" in prompt:
            return {"status": 400}
        if "invalid" in prompt:
            return {"content": "no claim"}
        claim = json.dumps({"text": f"claim about {prompt}", "sources": [{"title": "a"}, {"title": "b"}]})
        if "tools" in body:
            function = {"name": body["tools"][0]["function"]["name"], "arguments": claim}
            return {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        return {"content": claim if "response_format" in body else f"answer to {prompt}"}


class Server:
    """A server, and the requests that it got from one run."""

    def __init__(self, stub: OpenAIStub, answers: Answers) -> None:
        self.stub, self.answers = stub, answers

    def llm(self, model: str = "gpt-4o-mini") -> OpenAI:
        return OpenAI(model=model, api_base=self.stub.base_url, api_key="key", max_retries=0)

    def requests(self) -> list[str]:
        """Return the requests so far, sorted, and forget them."""
        requests = sorted(json.dumps(request) for request in self.stub.requests)
        self.stub.requests.clear()
        return requests

    def most_at_once(self) -> int:
        """Return how many requests were under way at most so far, and forget it."""
        most, self.answers.most_at_once = self.answers.most_at_once, 0
        return most


@pytest.fixture
def server() -> Iterator[Server]:
    answers = Answers(LATENCY_S)
    with openai_stub(answers) as stub:
        yield Server(stub, answers)


def compared(make: Callable[[Any], Any], server: Server, model: str = "gpt-4o-mini") -> tuple[int, int]:
    """Check that a workflow answers and sends requests as its original does, in two runs.

    Return how many of the original's requests, and of the accelerated workflow's, were under way at once.
    """
    expected = called(make(server.llm(model)))
    expected_requests, original_most = server.requests(), server.most_at_once()
    fast = accelerate(make(server.llm(model)))
    for _ in range(2):
        assert called(fast) == expected
        assert server.requests() == expected_requests
    return original_most, server.most_at_once()


class ModelWorkflow(Workflow):
    """A workflow with a model."""

    def __init__(self, llm: Any) -> None:
        super().__init__(timeout=60)
        self.llm = llm
        self.structured = llm.as_structured_llm(Claim)
        self.begun = time.perf_counter_ns()


class Predictions(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claims = [await self.llm.astructured_predict(Claim, TEMPLATE, role=role, query=ev.query) for role in ROLES]
        return StopEvent(result=[claim.text for claim in claims])


class PredictionsInALoop(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claims = []
        for role in ROLES:
            claim = await self.llm.astructured_predict(output_cls=Claim, prompt=TEMPLATE, role=role, query=ev.query)
            claims.append(claim)
        return StopEvent(result=[claim.model_dump() for claim in claims])


class FieldsInPrompts(ModelWorkflow):
    """Prompts read the fields of an answer, also of the objects in them."""

    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claim = await self.llm.astructured_predict(Claim, TEMPLATE, role="writer", query=ev.query)
        answers = [str(await self.llm.acomplete(f"{role}: {claim.text}")) for role in ROLES]
        for source in claim.sources:
            answers.append(str(await self.llm.acomplete(f"read {source.title} for {claim.text}")))
        return StopEvent(result=answers)


class CallsBehind(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claim = await self.llm.astructured_predict(CheckedClaim, TEMPLATE, role="writer", query=ev.query)
        praise = await self.llm.acomplete(f"praise {ev.query}")
        return StopEvent(result=f"{claim.text} {praise} {await self.llm.acomplete(claim.text)}")


class NewNumbers(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claim = await self.llm.astructured_predict(NumberedClaim, TEMPLATE, role="writer", query=ev.query)
        first = await self.llm.acomplete(claim.text)
        return StopEvent(result=f"{first} {await self.llm.acomplete(f'check {claim.number > self.begun}')}")


class StructuredLLMs(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        results = []
        for role in ROLES:
            response = await self.structured.acomplete(f"{role} {ev.query}")
            results.append(f"{response.raw.text} {response}")
        return StopEvent(result=results)


class ChatOfStructuredLLM(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        structured = self.llm.as_structured_llm(Claim)
        results = []
        for role in ROLES:
            response = await structured.achat([ChatMessage(role="user", content=f"{role} {ev.query}")])
            check = await self.llm.acomplete(f"check {response.raw.text} in {response.message.content}")
            results.append(f"{check.text} {response.raw.sources[0].title}")
        return StopEvent(result=results)


class SyncPredictions(ModelWorkflow):
    @step
    def ask(self, ev: StartEvent) -> StopEvent:
        claims = [self.llm.structured_predict(Claim, TEMPLATE, role=role, query=ev.query) for role in ROLES]
        texts = [self.structured.complete(f"{role} {ev.query}").text for role in ROLES]
        return StopEvent(result=[*[claim.text for claim in claims], *texts])


KINDS = (
    *(Predictions, PredictionsInALoop, FieldsInPrompts, CallsBehind),
    *(StructuredLLMs, ChatOfStructuredLLM, SyncPredictions),
)


@pytest.mark.parametrize("model", ["gpt-4o-mini", "gpt-3.5-turbo"])
@pytest.mark.parametrize("make", KINDS)
def test_calls_with_structured_answers_overlap(make: type[Workflow], model: str, server: Server) -> None:
    original_most, most = compared(make, server, model)

    assert original_most == 1
    assert most >= 2


@pytest.mark.parametrize("model", ["gpt-4o-mini", "gpt-3.5-turbo"])
def test_prompts_with_fields_of_an_answer_are_sent_side_by_side(model: str, server: Server) -> None:
    _, most = compared(FieldsInPrompts, server, model)

    assert most == 5


def test_prompt_with_a_field_that_a_function_fills_in_keeps_its_place(server: Server) -> None:
    _, most = compared(NewNumbers, server)

    assert most == 1


class TextModel(HostedLLM):
    """A model without tools, which writes JSON."""

    def _end(self, prompt: str) -> str:
        return json.dumps({"text": super()._end(prompt)[:30]})


def test_predictions_of_a_model_without_tools_overlap() -> None:
    original_llm, llm = TextModel(), TextModel()

    assert called(accelerate(FieldsInPrompts(llm))) == called(FieldsInPrompts(original_llm))
    assert llm.prompts == original_llm.prompts
    assert llm.most_at_once == len(ROLES)


# ------------------------------------------------------------ errors, and what is not understood


class Failing(ModelWorkflow):
    """The second of three predictions fails, for a reason in its prompt."""

    reason = ""

    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claims = []
        for word in ("first", self.reason, "third"):
            claims.append(await self.llm.astructured_predict(Claim, TEMPLATE, role=word, query=ev.query))
        return StopEvent(result=claims)


class Refused(Failing):
    reason = "refused"


class Invalid(Failing):
    reason = "invalid"


@pytest.mark.parametrize("model", ["gpt-4o-mini", "gpt-3.5-turbo"])
@pytest.mark.parametrize("make", [Refused, Invalid])
def test_error_of_a_structured_answer_is_the_originals(make: type[Workflow], model: str, server: Server) -> None:
    errors = []
    for change in (lambda workflow: workflow, accelerate):
        with pytest.raises(Exception) as caught:
            called(change(make(server.llm(model))))
        errors.append((type(caught.value), str(caught.value)))

    assert errors[0] == errors[1]


class WithArguments(ModelWorkflow):
    """LlamaIndex writes into the arguments for the LLM."""

    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        options = {"temperature": 0.5}
        claims = [
            await self.llm.astructured_predict(Claim, TEMPLATE, options, role=role, query=ev.query) for role in ROLES
        ]
        return StopEvent(result=[claim.text for claim in claims])


class OwnPredict(OpenAI):
    """A model of the user's own, which asks in another way."""

    async def astructured_predict(self, output_cls: Any, prompt: Any, llm_kwargs: Any = None, **values: Any) -> Any:
        return output_cls(text=str(await self.acomplete(prompt.format(**values))))


class OwnSchema(Claim):
    """A claim whose schema is written by code of the user's."""

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return super().model_json_schema(*args, **kwargs)


class OwnSchemas(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        claims = [await self.llm.astructured_predict(OwnSchema, TEMPLATE, role=role, query=ev.query) for role in ROLES]
        return StopEvent(result=[claim.text for claim in claims])


def own_predict(llm: OpenAI) -> Workflow:
    return Predictions(OwnPredict(model=llm.model, api_base=llm.api_base, api_key="key"))


@pytest.mark.parametrize("make", [WithArguments, OwnSchemas, own_predict])
def test_structured_calls_with_code_of_the_users_keep_their_place(make: Any, server: Server) -> None:
    _, most = compared(make, server)

    assert most == 1


class NoticedEvents(BaseEventHandler):
    """Notes the names of LlamaIndex's events."""

    names: list[str] = Field(default_factory=list)

    @classmethod
    def class_name(cls) -> str:
        return "NoticedEvents"

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(type(event).__name__)


@pytest.mark.parametrize("make", [Predictions, ChatOfStructuredLLM])
def test_handlers_get_each_event_of_a_structured_answer_once(make: type[Workflow], server: Server) -> None:
    handler = NoticedEvents()
    get_dispatcher().add_event_handler(handler)
    try:
        called(make(server.llm("gpt-3.5-turbo")))
        expected, handler.names = handler.names, []
        called(accelerate(make(server.llm("gpt-3.5-turbo"))))
    finally:
        get_dispatcher().event_handlers.remove(handler)

    assert expected
    assert handler.names == expected


class Written(Event):
    """A claim was written."""

    claim: Claim


class AcrossSteps(ModelWorkflow):
    @step
    async def write(self, ev: StartEvent) -> Written:
        return Written(claim=await self.llm.astructured_predict(Claim, TEMPLATE, role="writer", query=ev.query))

    @step
    async def check(self, ev: Written) -> StopEvent:
        answers = [str(await self.llm.acomplete(f"{role}: {ev.claim.text}")) for role in ROLES]
        return StopEvent(result=answers)


def test_claim_in_an_event_is_read_by_the_next_step(server: Server) -> None:
    _, most = compared(AcrossSteps, server)

    assert most == len(ROLES)
