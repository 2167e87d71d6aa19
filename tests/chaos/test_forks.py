"""Tests of processes that are forked after a pool was started: they fail at once, and the parent's engines go on."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from support.forking import in_fork
from support.own_leaves import SyncChat

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM
from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText

K = PrimitiveKind
EMBED = Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input")))], Ref("e"))


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as made:
        yield made


def answers(pool: EnginePool) -> bool:
    return bool(pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(10))


def chain(pool: EnginePool) -> Any:
    return ChatPromptTemplate.from_template("Say {word}") | ChatTeola(pool=pool)


WAYS: dict[str, Callable[[EnginePool], object]] = {
    "call": lambda pool: pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(),
    "streamed": lambda pool: list(pool.call(K.EMBEDDING, "embedder", [EmbedText("x")], stream=True).pieces),
    "submit": lambda pool: pool.runtime.submit(Query({"input": "x"}), EMBED, {}).output.result(),
    "watch": lambda pool: pool.runtime.watch(Query({"input": "x"})),
    "admin": lambda pool: pool.admin("store", "count", "docs").result(),
    "reset": lambda pool: pool.reset(),
    "start": lambda pool: pool.start(),
    "entered again": lambda pool: pool.__enter__(),
    "model": lambda pool: ChatTeola(pool=pool).invoke("x"),
    "async model": lambda pool: asyncio.run(ChatTeola(pool=pool).ainvoke("x")),
    "embeddings": lambda pool: TeolaEmbeddings(pool=pool).embed_query("x"),
    "chain": lambda pool: chain(pool).invoke({"word": "x"}),
    "accelerated": lambda pool: accelerate(chain(pool)).invoke({"word": "x"}),
    "accelerated, async": lambda pool: asyncio.run(accelerate(chain(pool)).ainvoke({"word": "x"})),
    "accelerated, streamed": lambda pool: list(accelerate(chain(pool)).stream({"word": "x"})),
    "accelerated, batch": lambda pool: accelerate(chain(pool)).batch([{"word": "x"}, {"word": "y"}]),
    "llamaindex": lambda pool: TeolaLLM(pool=pool).complete("x"),
    "llamaindex embedding": lambda pool: TeolaEmbedding(pool=pool).get_text_embedding("x"),
    "closed and started": lambda pool: (pool.close(), pool.start()),
}


@pytest.mark.parametrize("way", WAYS)
def test_forked_child_raises_at_once(pool: EnginePool, way: str) -> None:
    assert answers(pool)
    with pytest.raises(EngineUnavailable, match="before this process was forked") as caught:
        in_fork(lambda: WAYS[way](pool))
    assert "post_fork" in caught.value.hint and "spawn" in caught.value.hint
    assert answers(pool)


def test_object_accelerated_before_the_fork_raises_in_the_child(pool: EnginePool) -> None:
    fast = accelerate(chain(pool))
    fast.invoke({"word": "x"})
    with pytest.raises(EngineUnavailable, match="forked"):
        in_fork(lambda: fast.invoke({"word": "x"}))
    assert fast.invoke({"word": "x"})


def test_code_inside_a_query_may_fork(pool: EnginePool) -> None:
    """The child must not wait for the query, which goes on in the parent alone."""
    model = ChatTeola(pool=pool)

    def forks(given: Any) -> str:
        with pytest.raises(EngineUnavailable, match="forked"):
            in_fork(lambda: model.invoke("x"))
        return str(given.content)

    plain = chain(pool) | RunnableLambda(forks)
    assert accelerate(plain).invoke({"word": "x"}) == plain.invoke({"word": "x"})


@pytest.mark.parametrize("exits", [False, True])
def test_exit_of_a_child_leaves_the_engines_running(pool: EnginePool, exits: bool) -> None:
    def child() -> str:
        pool.close()
        pool.close()
        pool.runtime.loop.stop()
        return "closed"

    assert in_fork(child, exits=exits) == "closed"
    for _ in range(3):
        assert answers(pool)


def test_workers_start_their_own_pools() -> None:
    """With gunicorn's preloading, pools are created in the parent and started by the first request of each worker."""
    pool = EnginePool.local(fake_engines())

    def worker() -> str:
        with pool:
            return str(ChatTeola(pool=pool).invoke("x").content)

    answers_of_workers = {in_fork(worker) for _ in range(2)}
    assert answers_of_workers == {worker()}


def test_pool_closed_before_the_fork_starts_in_the_child() -> None:
    with EnginePool.local(fake_engines()) as pool:
        assert answers(pool)

    def child() -> bool:
        with pool:
            return answers(pool)

    assert in_fork(child) and in_fork(child)


def test_child_of_multiprocessing_fork_raises(pool: EnginePool) -> None:
    context = multiprocessing.get_context("fork")
    errors: Any = context.SimpleQueue()

    def work() -> None:
        try:
            ChatTeola(pool=pool).invoke("x")
        except EngineUnavailable as error:
            errors.put(str(error))

    child = context.Process(target=work)
    child.start()
    child.join(20)
    assert not child.is_alive() and "forked" in errors.get()
    assert answers(pool)


def test_fork_during_calls_of_other_threads_does_not_hang(pool: EnginePool) -> None:
    """Locks that they hold at that moment are held for ever in the child."""
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            answers(pool)

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with pytest.raises(EngineUnavailable, match="forked"):
                in_fork(lambda: answers(pool))
            assert in_fork(lambda: pool.close() or "closed") == "closed"
    finally:
        over.set()
        for thread in threads:
            thread.join(20)


# ---------------------------------------------------------------- without a pool


def own_chain() -> Any:
    """Return a chain of three independent steps on the user's own model."""
    model = SyncChat(says="own")
    ask = ChatPromptTemplate.from_template
    return RunnableParallel(
        a=ask("a {word}") | model, b=ask("b {word}") | model, c=RunnableLambda(lambda given: given["word"])
    ) | RunnableLambda(lambda found: [found["a"].content, found["b"].content, found["c"]])


def test_unbound_models_are_accelerated_in_a_forked_child() -> None:
    plain, fast = own_chain(), accelerate(own_chain())
    expected = plain.invoke({"word": "x"})
    assert in_fork(lambda: fast.invoke({"word": "x"})) == expected  # the parent has run nothing yet
    assert fast.invoke({"word": "x"}) == expected
    assert in_fork(lambda: fast.invoke({"word": "x"}), exits=True) == expected
    assert in_fork(lambda: asyncio.run(fast.ainvoke({"word": "x"})), exits=True) == expected
    assert in_fork(lambda: [fast.invoke({"word": "x"}), fast.invoke({"word": "y"})][0]) == expected
    assert in_fork(lambda: in_fork(lambda: fast.invoke({"word": "x"}))) == expected  # and in that one's child
    assert fast.invoke({"word": "x"}) == expected


def test_child_forked_during_prefetched_calls_answers() -> None:
    """A child inside a query, with calls of other threads under way: they do not end there, and nobody waits."""
    begun, go = threading.Event(), threading.Event()

    class Slow(SyncChat):
        def _generate(self, *given: Any, **more: Any) -> Any:
            begun.set()
            go.wait(20)
            return super()._generate(*given, **more)

    class Forking(SyncChat):
        """Asks for its own answer once more, in a child, while another call is under way."""

        def _generate(self, *given: Any, **more: Any) -> Any:
            assert begun.wait(20)
            found.append(in_fork(lambda: (inner.invoke({"word": "x"}), super(Forking, self)._generate(*given, **more))))
            go.set()
            return super()._generate(*given, **more)

    inner, found = accelerate(own_chain()), []
    expected = inner.invoke({"word": "x"})
    ask = ChatPromptTemplate.from_template
    first = ask("f {word}") | Forking(says="forks")
    fast = accelerate(RunnableParallel(f=first, m=ask("m {word}") | Slow(says="slow")), speculate="all")
    fast.invoke({"word": "x"})
    assert [one[0] for one in found] == [expected]


def test_queries_of_unbound_models_run_during_forks() -> None:
    fast = accelerate(own_chain())
    expected, over = fast.invoke({"word": "x"}), threading.Event()

    def busy() -> None:
        while not over.is_set():
            fast.invoke({"word": "x"})

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_fork(lambda: fast.invoke({"word": "x"})) == expected
            time.sleep(0.005)
    finally:
        over.set()
        for thread in threads:
            thread.join(20)
