"""What runs ahead of the plain object: steps that know which calls it is about to make, and with what.

A step is made once per query from an object that is exactly LlamaIndex's own. It awaits the outcomes of calls in the
order of the plain code. Where the plain object makes calls of a list one after the other, the first is left to it and
the others lead: they are made at once. What lies between two calls is LlamaIndex's own code, on silent copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from llama_index.core.base.embeddings.base import mean_agg

from teola_plugin.adapters.llamaindex.own_models.call_table import CallTable
from teola_plugin.adapters.llamaindex.own_models.calls import Failed
from teola_plugin.adapters.llamaindex.own_models.permission import Permission
from teola_plugin.shims.llamaindex.own_calls import EMBED, SEARCH, answered, asked_by, bodies, writes_own_prompts
from teola_plugin.tracer.llamaindex.classes import as_made
from teola_plugin.tracer.symbols import NotUnderstood

T = TypeVar("T")
Run = Callable[[Any], Any]
"""LLM -> what the framework's code returns; it asks the LLM once."""


@dataclass(frozen=True)
class Ahead:
    """How a step goes: on its own, or behind the plain object."""

    table: CallTable
    is_async: bool = False
    """The plain object runs the async methods here, in a loop of its own."""
    may_lead: bool = True
    """Not where the plain object makes the calls side by side by itself, in a loop of its own."""
    lead: bool = False
    needed: bool = False
    """Whether anybody waits for the step's result; without that only its calls matter."""
    waits: bool = True
    """Not where calls are only to be begun: an outcome that nobody looks at would take the plain object's time."""

    def leading(self) -> Ahead:
        return replace(self, lead=self.may_lead)

    def wanting(self, needed: bool) -> Ahead:
        """Of a step whose result is needed, or not."""
        return replace(self, needed=needed)

    @property
    def goes_on(self) -> bool:
        """Whether calls that need those before them are to be followed: somebody needs the result, or they lead."""
        return self.needed or self.lead

    def beginning(self) -> Ahead:
        """Of a list whose calls end a step: nobody waits for them where the result is not needed."""
        return self if self.needed else replace(self, waits=False)

    def side_by_side(self) -> Ahead:
        """In a part that the plain object runs in a loop, from its sync entry."""
        return self if self.is_async else replace(self, is_async=True, may_lead=False, lead=False)

    def in_sync_code(self) -> Ahead:
        """Of what is sync in async entries, too."""
        return replace(self, is_async=False)

    async def each(self, steps: Sequence[Callable[[Ahead], Awaitable[T]]]) -> list[T]:
        """What steps of a list give, or their exceptions; all but the first lead, as this one does."""
        ways = [self.leading() if i and not self.is_async else self for i in range(len(steps))]
        found = await asyncio.gather(*(go(way) for go, way in zip(steps, ways, strict=True)), return_exceptions=True)
        return found  # type: ignore[return-value]

    async def all(self, steps: Sequence[Callable[[Ahead], Awaitable[T]]]) -> list[T]:
        """`each`; raises the first exception."""
        found = await self.each(steps)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    async def ask(self, llm: Any, run: Run) -> Any:
        """What `run` makes of the LLM's answer."""
        with as_made():
            name, args, kwargs = asked_by(llm, run, is_async=self.is_async)
        text = await self.table.ahead(llm, name, args, kwargs, lead=self.lead)
        try:
            return answered(llm, run, text)
        except Exception as error:  # as it will do for the plain object
            raise Failed(repr(error)) from error

    async def said(self, llm: Any, run: Run) -> str:
        """`ask`, where `run` returns what the LLM says; nothing where it does not wait."""
        with as_made():
            name, args, kwargs = asked_by(llm, run, is_async=self.is_async)
        if not self.waits:
            self.table.wanted(llm, name, args, kwargs, lead=self.lead)
            return ""
        text: str = await self.table.ahead(llm, name, args, kwargs, lead=self.lead)
        return text

    async def embedded(self, model: Any, texts: Sequence[str]) -> list[float]:
        """`get_agg_embedding_from_queries`."""
        name = EMBED[self.is_async]

        def one(text: str) -> Callable[[Ahead], Awaitable[list[float]]]:
            return lambda ahead: ahead.table.ahead(model, name, (text,), {}, lead=ahead.lead)

        return mean_agg(await self.all([one(text) for text in texts]))

    async def searched(self, store: Any, query: Any, kwargs: dict[str, Any]) -> Any:
        return await self.table.ahead(store, SEARCH[self.is_async], (query,), kwargs, lead=self.lead)


@dataclass
class Question:
    """A query as it is handed from part to part: its vector is made once, by whoever needs it first."""

    text: str
    texts: Sequence[str] = ()
    vector: asyncio.Future[list[float]] | None = None

    async def embedded(self, ahead: Ahead, model: Any) -> list[float]:
        texts = self.texts or (self.text,)
        if ahead.is_async:  # the plain object keeps no vector there
            return await ahead.embedded(model, texts)
        if self.vector is None:
            self.vector = asyncio.ensure_future(ahead.embedded(model, texts))
        return await asyncio.shield(self.vector)


@dataclass
class Plan:
    """What is found out of an object before one of its sync entries runs."""

    permission: Permission
    leaves: dict[int, Any] = field(default_factory=dict)
    """The user's own models and stores that are called, by id."""
    known: dict[int, Any] = field(default_factory=dict)
    """Engines, retrievers and the like whose calls are known, by id."""
    counted: dict[int, Any] = field(default_factory=dict)
    """What stands for prompt helpers in the plain object's copy, by their ids: it counts no text a second time."""
    found: int = 0
    """How many lists there are whose calls may start sooner."""
    is_async: bool = False
    """While parts are looked at that the plain object runs in a loop."""

    def leaf(self, obj: Any) -> Any:
        """Notes an object whose calls are looked up. Raises `NotUnderstood` where they cannot be."""
        kind: Any = type(obj)
        with as_made():
            bodies(kind)
        if not hasattr(obj, "__dict__"):
            raise NotUnderstood(f"{type(obj).__name__} has no attributes")
        self.leaves[id(obj)] = obj
        return obj

    def llm(self, llm: Any) -> Any:
        """Notes an LLM. Raises `NotUnderstood`."""
        leaf = self.leaf(llm)
        if not self.permission.anywhere(llm):
            raise NotUnderstood(f"its LLM, a {type(llm).__name__}, is not known to take several calls at once")
        if writes_own_prompts(llm):
            raise NotUnderstood("functions of the user's own write its prompts")
        return leaf

    def lists(self, use_async: bool = False) -> None:
        """A list of calls that the plain object makes one after the other, unless it is told to use a loop."""
        if not (self.is_async or use_async):
            self.found += 1
