"""Tests of workflow steps that write their prompts by templates and messages of LlamaIndex."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate, RichPromptTemplate
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from support.hosted_steps import HostedLLM, called, compared

from teola_plugin import accelerate

ROLES = ["manager", "engineer", "designer"]
TEXT = PromptTemplate("As a {role}, comment on {query}")
RICH = RichPromptTemplate(
    "As a {{ role | upper }}, comment on {{ query }}{% if role == 'engineer' %} briefly{% endif %}"
)
RICH_CHAT = RichPromptTemplate(
    "{% chat role='system' %}You are a {{ role }}.{% endchat %}{% chat role='user' %}{{ query }}{% endchat %}"
)
CHAT = ChatPromptTemplate.from_messages([("system", "You are a {role}."), ("user", "{query}")])


class ModelWorkflow(Workflow):
    """A workflow with a model."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(timeout=60)
        self.llm = llm


class RichText(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        answers = [str(await self.llm.acomplete(RICH.format(role=role, query=ev.query))) for role in ROLES]
        return StopEvent(result=answers)


class FormattedMessages(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        answers = []
        for template in (TEXT, CHAT, RICH, RICH_CHAT):
            messages = template.format_messages(role="writer", query=ev.query)
            answers.append((await self.llm.achat(messages)).message.content)
        return StopEvent(result=answers)


class MadeInTheStep(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        template = PromptTemplate("{role} of {query}")
        system = ChatMessage(role="system", content="You are a {role}.")
        chat = ChatPromptTemplate([system, ChatMessage(role=MessageRole.USER, content="{query}")])
        pairs = ChatPromptTemplate.from_messages([("system", "Be a {role}."), ("user", "{query}")])
        rich = RichPromptTemplate("{{ role }} for {{ query }}")
        answers = []
        for role in ROLES:
            answers.append(str(await self.llm.acomplete(template.format(role=role, query=ev.query))))
            answers.append(str(await self.llm.acomplete(rich.format(role=role, query=ev.query))))
            answers.append(str(await self.llm.achat(chat.format_messages(role=role, query=ev.query))))
            answers.append(str(await self.llm.achat(pairs.format_messages(role=role, query=ev.query))))
        return StopEvent(result=answers)


class Predicted(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        answers = []
        for role in ROLES:
            answers.append(await self.llm.apredict(RICH, role=role, query=ev.query))
            answers.append(await self.llm.apredict(CHAT, role=role, query=ev.query))
            answers.append(await self.llm.apredict(PromptTemplate("{role}?"), role=role))
        return StopEvent(result=answers)


class PartlyFormatted(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        engineers = TEXT.partial_format(role="engineer")
        questions = [ev.query, f"more {ev.query}"]
        answers = [str(await self.llm.acomplete(engineers.format(query=question))) for question in questions]
        return StopEvent(result=[*answers, TEXT.format(role="writer", query=ev.query)])


class Messages(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        answers = []
        for role in ROLES:
            answers.append(await self.llm.achat([ChatMessage(f"{role} {ev.query}")]))
            answers.append(await self.llm.achat([ChatMessage(f"{role}", role="system"), ChatMessage(ev.query)]))
            answers.append(await self.llm.achat([ChatMessage.from_str(f"{role} of {ev.query}", MessageRole.ASSISTANT)]))
            answers.append(await self.llm.achat([ChatMessage.from_str(content=ev.query, role="system")]))
            answers.append(await self.llm.achat([ChatMessage.from_str(role)]))
        return StopEvent(result=[answer.message.content for answer in answers])


@pytest.mark.parametrize("make", [RichText, FormattedMessages, MadeInTheStep, Predicted, PartlyFormatted, Messages])
def test_calls_with_written_prompts_overlap(make: type[Workflow]) -> None:
    original_llm, llm = compared(make)

    assert original_llm.most_at_once == 1
    assert llm.most_at_once >= 2


class Answered(ModelWorkflow):
    """The second prompt is written with the answer to the first one."""

    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        first = await self.llm.acomplete(RICH.format(role="writer", query=ev.query))
        answers = [await self.llm.achat(RICH_CHAT.format_messages(role=role, query=first.text)) for role in ROLES]
        return StopEvent(result=[answer.message.content for answer in answers])


def test_prompts_with_an_answer_are_written_once_it_is_there() -> None:
    _, llm = compared(Answered)

    assert llm.most_at_once == len(ROLES)


# ------------------------------------------------------------ errors, and what is not understood


class MissingVariable(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        first = await self.llm.acomplete(TEXT.format(role="writer", query=ev.query))
        second = await self.llm.acomplete(TEXT.format(role="writer", query=ev.missing))
        return StopEvent(result=f"{first} {second}")


class UnknownRole(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        first = await self.llm.acomplete(ev.query)
        second = await self.llm.achat([ChatMessage.from_str(ev.query, "nobody")])
        return StopEvent(result=f"{first} {second}")


@pytest.mark.parametrize("make", [MissingVariable, UnknownRole])
def test_error_of_a_prompt_is_the_originals(make: type[Workflow]) -> None:
    errors, prompts = [], []
    for change in (lambda workflow: workflow, accelerate):
        llm = HostedLLM()
        with pytest.raises(Exception) as caught:
            called(change(make(llm)))
        errors.append((type(caught.value), str(caught.value)))
        prompts.append(llm.prompts)

    assert errors[0] == errors[1]
    assert prompts[0] == prompts[1]


class Counted:
    """An object of the user's, whose property counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    @property
    def name(self) -> str:
        self.reads += 1
        return f"read {self.reads} times"

    def __str__(self) -> str:
        return self.name


class OwnObject(ModelWorkflow):
    """A template reads an object of the user's, which may do anything."""

    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        rich = RichPromptTemplate("{{ who.name }} {{ query }}")
        answers = []
        for role in ROLES:
            answers.append(str(await self.llm.acomplete(rich.format(who=ev.who, query=role))))
            answers.append(str(await self.llm.acomplete(TEXT.format(role=ev.who, query=role))))
        return StopEvent(result=[answers, ev.who.reads])


class RandomTemplate(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        rich = RichPromptTemplate("{{ ['oats'] | random }} {{ query }}")
        return StopEvent(result=[str(await self.llm.acomplete(rich.format(query=role))) for role in ROLES])


class OwnTemplate(PromptTemplate):
    """A template of the user's own."""

    def format(self, *args: Any, **values: Any) -> str:
        return super().format(*args, **values).upper()


OWN = OwnTemplate("{role}")
MAPPED = PromptTemplate("{role} {extra}", function_mappings={"extra": lambda **values: str(len(values))})


class OwnTemplates(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        answers = [str(await self.llm.acomplete(OWN.format(role=role))) for role in ROLES]
        answers += [str(await self.llm.acomplete(MAPPED.format(role=role))) for role in ROLES]
        return StopEvent(result=answers)


class ChangedTemplate(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        template = PromptTemplate("{role} {place}", place="here")
        answers = []
        for role in ROLES:
            answers.append(str(await self.llm.acomplete(template.format(role=role))))
            template.kwargs["place"] = role
        return StopEvent(result=answers)


@pytest.mark.parametrize("make", [RandomTemplate, OwnTemplates, ChangedTemplate])
def test_prompts_of_other_templates_keep_their_place(make: type[Workflow]) -> None:
    _, llm = compared(make)

    assert llm.most_at_once == 1


def test_objects_of_the_users_are_read_as_often_as_by_the_original() -> None:
    results = []
    for change in (lambda workflow: workflow, accelerate):
        llm = HostedLLM()
        workflow = change(OwnObject(llm))
        results.append((run_with(workflow, who=Counted()), llm.prompts))

    assert results[0] == results[1]


def run_with(workflow: Any, **values: Any) -> Any:
    """Return the result of a run with an event of these values."""

    async def run() -> Any:
        return await workflow.run(**values)

    return asyncio.run(run())


class FailingCall(ModelWorkflow):
    @step
    async def ask(self, ev: StartEvent) -> StopEvent:
        answers = [str(await self.llm.acomplete(RICH.format(role=role, query=ev.query))) for role in ROLES]
        return StopEvent(result=answers)


def test_error_of_a_call_with_a_written_prompt_is_the_originals() -> None:
    errors = []
    for change in (lambda workflow: workflow, accelerate):
        with pytest.raises(Exception) as caught:
            called(change(FailingCall(HostedLLM(fails_on="ENGINEER"))))
        errors.append((type(caught.value), str(caught.value)))

    assert errors[0] == errors[1]
