"""`TitleExtractor` asks for a title of each node of a document, one after the other: they are asked for side by side.

All of them are sure. LlamaIndex's own code still goes from node to node, with its events, and takes each call's outcome
in its place. No more calls are under way than the extractor has workers, all documents together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from llama_index.core.extractors import TitleExtractor

from teola_plugin.adapters.llamaindex.own_models.calls import Asked
from teola_plugin.adapters.snapshots import NotCopied
from teola_plugin.shims.llamaindex.copies import at_once, clone
from teola_plugin.shims.llamaindex.models import is_paced
from teola_plugin.shims.llamaindex.own_calls import AsksAnother, asked_by, below, leaf_of, writes_own_prompts
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.pydantic import of_class
from teola_plugin.tracer.llamaindex.classes import changed, is_leaf


class _Early:
    """The calls of one document, each with its outcome."""

    def __init__(self, llm: Any, asked: Sequence[tuple[str, Asked]], room: int) -> None:
        self.llm = llm
        self._room = asyncio.Semaphore(room)
        self._failed = False
        self._calls: list[tuple[str, Asked, asyncio.Task[Any]]] = []
        for name, one in asked:
            if not any(name == known and one.equals(other) for known, other, _ in self._calls):  # equal ones wait
                self._calls.append((name, one, asyncio.create_task(self._made(name, one))))

    async def _made(self, name: str, asked: Asked) -> Any:
        args, kwargs = asked.given()
        async with self._room:
            if self._failed:  # the plain code comes no further than there
                raise AsksAnother
            try:
                return await below(self.llm, name)(*args, **kwargs)
            except BaseException:
                self._failed = True
                raise

    def take(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Task[Any] | None:
        """The call that was made with the very same."""
        try:
            asked = Asked.of(args, kwargs)
        except NotCopied:
            return None
        for one in self._calls:
            if one[0] == name and one[1].equals(asked):
                self._calls.remove(one)
                return one[2]
        return None

    def close(self) -> None:
        """What the plain code did not come to."""
        for _, _, task in self._calls:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # heard by nobody


_room: ContextVar[int] = ContextVar("teola_title_room", default=1)
"""Calls that one document may have under way."""
_current: ContextVar[_Early | None] = ContextVar("teola_titles", default=None)


class OwnTitles:
    """Stands before `TitleExtractor` in the order of methods."""

    __teola_own__: TitleExtractor
    """The user's own."""

    if TYPE_CHECKING:
        num_workers: int

    async def extract_titles(self, nodes_by_doc_id: Mapping[Any, Any]) -> Any:
        token = _room.set(self.num_workers // max(1, len(nodes_by_doc_id)))
        try:
            return await super().extract_titles(nodes_by_doc_id)  # type: ignore[misc]
        finally:
            _room.reset(token)

    async def get_title_candidates(self, nodes: list[Any]) -> Any:
        plain = super().get_title_candidates  # type: ignore[misc]
        early = self._begun(nodes)
        if early is None:
            return await plain(nodes)
        token = _current.set(early)
        try:
            return await plain(nodes)
        finally:
            _current.reset(token)
            early.close()

    def _begun(self, nodes: Sequence[Any]) -> _Early | None:
        own, room = self.__teola_own__, _room.get()
        if room < 2 or len(nodes) < 2:
            return None
        try:
            asked = [_asked(own, node) for node in nodes]
        except Exception:  # the plain code will tell
            return None
        return _Early(own.llm, asked, room)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the user's own object is pickled, for worker processes."""
        return _itself, (self.__teola_own__,)


def _itself(extractor: Any) -> Any:
    return extractor


def _asked(own: TitleExtractor, node: Any) -> tuple[str, Asked]:
    """What the extractor's own code asks its LLM for, found out on a copy that asks nobody."""

    def run(llm: Any) -> Any:
        async def apredict(*args: Any, **kwargs: Any) -> Any:
            return llm.predict(*args, **kwargs)

        dry = own.model_copy(update={"llm": clone(llm, apredict=apredict)})
        return at_once(TitleExtractor.get_title_candidates(dry, [node]))

    name, args, kwargs = asked_by(own.llm, run, is_async=True)
    return name, Asked.of(args, kwargs)


def _call(own: Any, name: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return body(own, *args, **kwargs)


async def _acall(own: Any, name: str, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    early = _current.get()
    task = early.take(name, args, kwargs) if early is not None and vars(early.llm) is vars(own) else None
    if task is None:
        return await body(own, *args, **kwargs)
    try:
        return await task
    except AsksAnother:  # it was not made after all
        return await body(own, *args, **kwargs)


def titles_side_by_side(extractor: Any) -> Any:
    """`extractor`, or for a `TitleExtractor` with an LLM of the user's own a copy that asks side by side."""
    if type(extractor) is not TitleExtractor or changed(extractor, TitleExtractor):
        return extractor
    llm: Any = extractor.llm
    if is_leaf(llm) or is_paced(llm) or writes_own_prompts(llm):
        return extractor
    try:
        leaf = leaf_of(llm, _call, _acall)
    except Unreadable:  # its calls cannot be told from their events
        return extractor
    values = {"__module__": TitleExtractor.__module__, "__qualname__": "TitleExtractor", "__teola_own__": extractor}
    theirs: Any = TitleExtractor
    return of_class(type(theirs)("TitleExtractor", (OwnTitles, theirs), values), extractor, {"llm": leaf}, {})
