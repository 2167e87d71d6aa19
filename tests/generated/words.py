"""The names that texts of programs may use: pool-backed parts, and user code that writes, changes values or fails."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from generated.own_objects import Hosted, Local, Notes
from generated.worlds import RequestCounts, World
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_text_splitters import RecursiveCharacterTextSplitter

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore

LIST = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
Given = dict[str, Any]


def joined(documents: list[Document]) -> str:
    return "; ".join(document.page_content for document in documents)


def base(world: World) -> dict[str, Any]:
    """Return the framework's names and the pool-backed parts."""
    pool = world.pool
    embeddings = TeolaEmbeddings(pool=pool)
    store = TeolaVectorStore(pool=pool, embedding=embeddings, collection="notes")
    uploads = TeolaVectorStore(pool=pool, embedding=embeddings, collection="uploads")
    splitter = RecursiveCharacterTextSplitter(chunk_size=40, chunk_overlap=0)
    llm = ChatTeola(pool=pool, max_tokens=6)

    def ask(text: str, model: Runnable[Any, Any] = llm) -> Runnable[Any, str]:
        return ChatPromptTemplate.from_template(text) | model | StrOutputParser()

    def listed(text: str) -> Runnable[Any, list[str]]:
        model = llm.bind(json_schema=LIST, max_tokens=40)
        return ChatPromptTemplate.from_template(text) | model | JsonOutputParser()

    return {
        "ChatPromptTemplate": ChatPromptTemplate,
        "Document": Document,
        "HumanMessage": HumanMessage,
        "RouterRunnable": RouterRunnable,
        "JsonOutputParser": JsonOutputParser,
        "RunnableBranch": RunnableBranch,
        "RunnableLambda": RunnableLambda,
        "RunnableParallel": RunnableParallel,
        "StrOutputParser": StrOutputParser,
        "accelerate": accelerate,
        "ask": ask,
        "assign": RunnablePassthrough.assign,
        "embeddings": embeddings,
        "get": lambda key: RunnableLambda(itemgetter(key)),
        "index": TeolaIndexer(store=store, splitter=splitter),
        "index_uploads": TeolaIndexer(store=uploads, splitter=splitter),
        "itemgetter": itemgetter,
        "joined": joined,
        "listed": listed,
        "llm": llm,
        "passthrough": RunnablePassthrough(),
        "rerank": TeolaRerank(pool=pool, top_n=2).as_runnable(),
        "retriever": store.as_retriever(search_kwargs={"k": 3}),
        "retrieve_uploads": uploads.as_retriever(search_kwargs={"k": 3}),
        "store": store,
        "uploads": uploads,
    }


class Op(NamedTuple):
    """One operation of user code, for sync and for async callers."""

    here: Callable[..., Any]
    awaited: Callable[..., Coroutine[Any, Any, Any]]
    args: tuple[Any, ...]

    def run(self) -> Any:
        return self.here(*self.args)

    async def arun(self) -> Any:
        return await self.awaited(*self.args)


Steps = Generator[Op, Any, Given | None]
"""User code: yields its operations, gets their values, and returns what it adds to the state."""


def opaque(counts: RequestCounts, gives_on: bool, work: Callable[..., Steps], *args: Any) -> RunnableLambda[Given, Any]:
    """Return user code as a step of a chain, which is opaque to the tracer.

    With `gives_on`, its value is the state with the work's result added, otherwise the result alone.
    """

    def ended(d: Given, found: Given | None) -> Any:
        return ({**d, **found} if found else d) if gives_on else (found or "done")

    def run(d: Given) -> Any:
        counts.note(f"{work.__name__}{args}")
        going, value = work(d, *args), None
        while True:
            try:
                value = going.send(value).run()
            except StopIteration as end:
                return ended(d, end.value)

    async def arun(d: Given) -> Any:
        counts.note(f"{work.__name__}{args}")
        going, value = work(d, *args), None
        while True:
            try:
                operation = going.send(value)
            except StopIteration as end:
                return ended(d, end.value)
            value = await operation.arun()

    return RunnableLambda(run, arun, name=work.__name__)


def writers(world: World, names: dict[str, Any]) -> dict[str, Any]:
    """Return user code that writes, reads, changes values in place and fails, for steps like `does(put, "a", "text")`.

    `does` passes on the state, and `did` passes on the result.
    """
    store, loop, aside = names["store"], world.pool.runtime.loop, world.aside

    def past_the_pool(work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Op:
        return Op(lambda *given: loop.run(work(*given)).result(10), work, args)

    def put(d: Given, id: str, text: str) -> Steps:
        yield Op(lambda: store.add_texts([text], ids=[id]), lambda: store.aadd_texts([text], ids=[id]), ())

    def add(d: Given) -> Steps:
        yield Op(store.add_documents, store.aadd_documents, (d["docs"],))

    def drop(d: Given, *ids: str) -> Steps:
        yield Op(store.delete, store.adelete, (list(ids),))

    def clear(d: Given) -> Steps:
        yield Op(store.delete, store.adelete, ())

    def outside_put(d: Given, id: str, text: str) -> Steps:
        yield past_the_pool(aside.put, "notes", id, text)

    def outside_drop(d: Given, id: str) -> Steps:
        yield past_the_pool(aside.delete, "notes", [id])

    def look(d: Given, key: str, query: str) -> Steps:
        found = yield Op(store.similarity_search, store.asimilarity_search, (query, 3))
        return {key: found}

    def read(d: Given, key: str) -> Steps:
        found = yield Op(store.get_by_ids, store.aget_by_ids, (["a", "b", "c"],))
        return {key: [(one.id, one.page_content, one.metadata) for one in found]}

    def stamp(d: Given, version: int) -> Steps:
        for document in d["docs"]:
            document.metadata["version"] = version
        yield from ()

    def rewrite(d: Given, word: str) -> Steps:
        d["docs"][0].page_content += f" {word}"
        yield from ()

    def extend(d: Given, text: str) -> Steps:
        d["docs"].append(Document(page_content=text))
        yield from ()

    def change_question(d: Given, word: str) -> Steps:
        d["question"] += f" {word}"
        yield from ()

    def fail(d: Given, what: str) -> Steps:
        raise ValueError(what)
        yield

    def fail_once(d: Given, what: str) -> Steps:
        if world.counts.side_effects[f"fail_once{(what,)}"] == 1:
            raise ValueError(what)
        yield from ()

    known = (put, add, drop, clear, outside_put, outside_drop, look, read)
    known += (stamp, rewrite, extend, change_question, fail, fail_once)
    return {each.__name__: each for each in known} | {
        "does": partial(opaque, world.counts, True),
        "did": partial(opaque, world.counts, False),
    }


def thinkers(world: World, names: dict[str, Any]) -> dict[str, Any]:
    """Return `writers`, the user's own models, and user code on texts, some of which raises."""
    counts, scale = world.counts, world.scale
    hosted, local = Hosted(counts=counts, scale=scale), Local(counts=counts, scale=scale)

    def remember(d: Given, what: str) -> Steps:
        d["history"].append(what)
        d["messages"].append(HumanMessage(what))
        yield from ()

    def correct(d: Given, what: str) -> Steps:
        d["messages"][0].content += f", {what}"
        yield from ()

    def allow(d: Given, word: str) -> Steps:
        if word in d["question"]:
            raise PermissionError(f"{word} is not for you")
        yield from ()

    def tells(what: str) -> RunnableLambda[Any, str]:
        def told(value: Any) -> str:
            counts.note(f"tells {what}")
            return f"{what} of {len(str(value))}"

        return RunnableLambda(told)

    def refuses(word: str) -> RunnableLambda[str, str]:
        def refused(text: str) -> str:
            counts.note(f"refuses {word}")
            if word in text:
                raise PermissionError(f"no {word}")
            return text

        return RunnableLambda(refused)

    def tells_length(text: str) -> int:
        counts.note("tells length")
        return len(text)

    return writers(world, names) | {
        "allow": allow,
        "correct": correct,
        "hosted": hosted,
        "local": local,
        "notes": Notes(counts=counts, scale=scale),
        "refuses": refuses,
        "remember": remember,
        "tells": tells,
        "tells_length": tells_length,
    }


def run_text(text: str, names: dict[str, Any], name: str) -> dict[str, Any]:
    """Execute a program as if it were in a file, so that the sources of its lambdas can be read."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), names)
    return names
