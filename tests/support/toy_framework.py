"""A framework of one page: models, templates, a sequence and a loop, sync and async, with events for listeners.

The state of a query is a dictionary. A step reads some of its keys and writes one.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

listeners: list[Callable[[str, str], None]] = []
"""Functions that are called with the name and the text of each event."""


def tell(event: str, text: str) -> None:
    for listener in listeners:
        listener(event, text)


class ToyModel:
    """Answers prompts. Integrations define `_ask`, and `_aask` if they have async code."""

    def ask(self, prompt: str, **options: Any) -> str:
        tell("asked", prompt)
        answer = self._ask(prompt, **options)
        tell("answered", answer)
        return answer

    async def aask(self, prompt: str, **options: Any) -> str:
        tell("asked", prompt)
        answer = await self._aask(prompt, **options)
        tell("answered", answer)
        return answer

    def _ask(self, prompt: str, **options: Any) -> str:
        raise NotImplementedError

    async def _aask(self, prompt: str, **options: Any) -> str:
        return self._ask(prompt, **options)


class ToyStep:
    """One step of an app: reads the state, and returns what it adds to it."""

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def arun(self, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class Ask(ToyStep):
    """Asks a model with a template, whose variables are keys of the state."""

    def __init__(self, model: ToyModel, template: str, into: str, **options: Any) -> None:
        self.model, self.template, self.into, self.options = model, template, into, options

    @property
    def variables(self) -> list[str]:
        return [name for _, name, _, _ in string.Formatter().parse(self.template) if name]

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        return {self.into: self.model.ask(self.template.format(**state), **self.options)}

    async def arun(self, state: dict[str, Any]) -> dict[str, Any]:
        return {self.into: await self.model.aask(self.template.format(**state), **self.options)}


class ToySteps(ToyStep):
    """Steps that run one after the other. Each reads what the earlier ones wrote."""

    def __init__(self, steps: Sequence[ToyStep]) -> None:
        self.steps = list(steps)

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        state = dict(state)
        for step in self.steps:
            tell("step", type(step).__name__)
            state.update(step.run(state))
        return state

    async def arun(self, state: dict[str, Any]) -> dict[str, Any]:
        state = dict(state)
        for step in self.steps:
            tell("step", type(step).__name__)
            state.update(await step.arun(state))
        return state


class ForEach(ToyStep):
    """A step that runs another one for each item of a list, with the item as `item` in the state.

    It writes the list of answers.
    """

    def __init__(self, items: str, step: Ask, into: str) -> None:
        self.items, self.step, self.into = items, step, into

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        answers = [self.step.run({**state, "item": item})[self.step.into] for item in state[self.items]]
        return {self.into: answers}

    async def arun(self, state: dict[str, Any]) -> dict[str, Any]:
        answers = []
        for item in state[self.items]:
            answers.append((await self.step.arun({**state, "item": item}))[self.step.into])
        return {self.into: answers}


class ToyApp:
    """An app of the framework, with its sync and async entry points."""

    def __init__(self, steps: Sequence[ToyStep]) -> None:
        self.steps = ToySteps(steps)

    def answer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return self.steps.run(dict(state))

    async def aanswer(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return await self.steps.arun(dict(state))
