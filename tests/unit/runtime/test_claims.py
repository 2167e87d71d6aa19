"""Tests of prefetched results: which of them the original gets, and which it never gets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.scripted_llm import ScriptedLLM

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeStore, Faults
from teola_plugin.errors import EngineError, QueryError
from teola_plugin.graph import (
    Attributes,
    Curve,
    Effect,
    EngineProfile,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Query,
    Ref,
    RequestContext,
    named,
)
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import (
    Chunk,
    Done,
    EmbedText,
    Failed,
    Generate,
    Generation,
    IngestRow,
    Piece,
    Prompt,
    Request,
    SearchVector,
)
from teola_plugin.runtime import original_calls
from teola_plugin.runtime.driver.graph_driver import GraphDriver
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.runtime.prefetch_outcomes import OncePerCause
from teola_plugin.runtime.query_run import QueryRun, current_request_context
from teola_plugin.scheduling.events import Collect

K = PrimitiveKind
NEEDLE = (1.0, 0.0)
SEARCH = Primitive(
    "found", K.SEARCHING, "store", named(vectors=Ref("$input")), attributes=Attributes(collection="c", k=4)
)
WRITE = Primitive(
    "rows",
    K.INGESTION,
    "store",
    named(chunks=Ref("$chunks"), vectors=Ref("$vectors")),
    batchable=True,
    effects=(Effect("collection:store/c", writes=True),),
    attributes=Attributes(collection="c"),
)


class Seen:
    """A pool of fakes that writes down what its engines are asked for."""

    def __init__(self, *, faults: Faults | None = None) -> None:
        self.requests: list[Request] = []
        self.store = FakeStore("store", faults=faults or Faults())
        self.llm = FakeLLM("llm", faults=faults or Faults())
        self.embedder = FakeEmbedder("embedder", faults=faults or Faults())
        for engine in (self.store, self.llm, self.embedder):
            self._watch(engine)
        self.pool = EnginePool.local([self.store, self.llm, self.embedder])

    def _watch(self, engine: Any) -> None:
        execute = engine.execute

        def seen(batch: Any) -> Any:
            self.requests += batch
            return execute(batch)

        engine.execute = seen

    def of(self, kind: PrimitiveKind) -> int:
        return sum(request.kind is kind for request in self.requests)

    def prefetch(self, *primitives: Primitive, **inputs: Any) -> QueryRun:
        given = {"input": NEEDLE, **inputs}
        graph = Graph(primitives, Ref(primitives[-1].id))
        return self.pool.runtime.submit(Query(given), graph, {}, has_original=True)

    def put(self, text: str) -> None:
        """Write a row as another process would."""
        row = IngestRow("c", Chunk("a", text), NEEDLE)
        self.pool.call(K.INGESTION, "store", [row]).result(5)

    def wait(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            threading.Event().wait(0.002)
        raise AssertionError("it does not come")


@pytest.fixture
def seen() -> Iterator[Seen]:
    made = Seen()
    with made.pool:
        yield made


def texts(run: QueryRun) -> list[str]:
    [hits] = run.call(K.SEARCHING, "store", [SearchVector("c", NEEDLE, 4)]).result(5)
    return [hit.text for hit in hits]


# ---------------------------------------------------------------- searches


def test_search_is_claimed_while_its_collection_is_unchanged(seen: Seen) -> None:
    seen.put("old")
    run = seen.prefetch(SEARCH)
    seen.wait(lambda: seen.of(K.SEARCHING) == 1)
    assert texts(run) == texts(run) == ["old"] and seen.of(K.SEARCHING) == 1
    run.close()


def test_search_prefetched_before_a_write_is_made_again(seen: Seen) -> None:
    seen.put("old")
    run = seen.prefetch(SEARCH)
    seen.wait(lambda: seen.of(K.SEARCHING) == 1)
    seen.put("new")
    assert texts(run) == ["new"] and seen.of(K.SEARCHING) == 2
    assert texts(run) == ["new"] and seen.of(K.SEARCHING) == 2, "the second may be claimed"
    run.close()


@pytest.mark.parametrize("user_code", [False, True])
def test_search_without_version_is_not_claimed_across_user_code(user_code: bool) -> None:
    seen = Seen(faults=Faults(no_version=True))
    opaque = [Primitive("user", K.OPAQUE, inputs=named(value=Ref("$input")))] if user_code else []
    with seen.pool:
        run = seen.prefetch(*opaque, SEARCH)
        seen.wait(lambda: seen.of(K.SEARCHING) == 1)
        texts(run)
        assert seen.of(K.SEARCHING) == (2 if user_code else 1)
        run.close()


class SlowToTell(FakeStore):
    """Says at which version a collection is when it is told to."""

    def __init__(self) -> None:
        super().__init__("store")
        self.version_requested, self.version_known = threading.Event(), threading.Event()

    async def version(self, collection: str) -> Any:
        self.version_requested.set()
        while not self.version_known.is_set():
            await asyncio.sleep(0.001)
        return await super().version(collection)


def test_claimed_search_outlives_its_subplan_until_it_is_taken() -> None:
    """Though the part that asked for it ends while its version is looked up."""
    store = SlowToTell()
    with EnginePool.local([store]) as pool:
        pool.call(K.INGESTION, "store", [IngestRow("c", Chunk("a", "text"), NEEDLE)]).result(5)
        run = pool.runtime.watch(Query({"input": None}), joins=True)
        part = run.begin_subplan(Graph([SEARCH], Ref("found")), {}, NEEDLE)
        handle = run.call(K.SEARCHING, "store", [SearchVector("c", NEEDLE, 4)])
        assert store.version_requested.wait(5)
        part.close()
        pool.runtime.loop.run(asyncio.sleep(0.02)).result(5)
        store.version_known.set()
        [hits] = handle.result(5)
        assert [hit.text for hit in hits] == ["text"]
        run.close()


# ---------------------------------------------------------------- writes


def test_planned_rows_are_written_once_by_the_original(seen: Seen) -> None:
    chunks, after = [Chunk("a", "text", {"n": 1})], SEARCH.with_(after=("rows",))
    run = seen.prefetch(WRITE, after, chunks=chunks, vectors=[NEEDLE])
    threading.Event().wait(0.05)
    assert seen.requests == [], "the graph waits, and so does what it would search for"
    run.call(K.INGESTION, "store", [IngestRow("c", chunks[0], NEEDLE)]).result(5)
    seen.wait(lambda: seen.of(K.SEARCHING) == 1)
    assert texts(run) == ["text"] and (seen.of(K.INGESTION), seen.of(K.SEARCHING)) == (1, 1)
    run.close()


def test_rows_changed_by_the_original_are_written_as_changed(seen: Seen) -> None:
    run = seen.prefetch(WRITE, chunks=[Chunk("a", "text", {"n": 1})], vectors=[NEEDLE])
    run.call(K.INGESTION, "store", [IngestRow("c", Chunk("a", "text", {"n": True}), NEEDLE)]).result(5)
    run.close()
    [chunk] = seen.pool.admin("store", "get", "c", ["a"]).result(5)
    assert chunk.metadata == {"n": True} and isinstance(chunk.metadata["n"], bool) and seen.of(K.INGESTION) == 1


# ---------------------------------------------------------------- failures


def test_prefetched_call_that_fails_after_its_claim_is_repeated() -> None:
    failed = list[str]()

    def first(request: Request) -> bool:
        failed.append(request.id)
        return len(set(failed)) == 1

    seen = Seen(faults=Faults(fail_on=first, retryable=False))
    with seen.pool:
        run = seen.prefetch(Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$text"))), text="a")
        [vector] = run.call(K.EMBEDDING, "embedder", [EmbedText("a")]).result(5)
        assert len(vector) and 1 <= seen.of(K.EMBEDDING) <= 2
        run.close()
        trace = run.trace.result(5)
        assert trace is not None and trace.wasted()[0] == seen.of(K.EMBEDDING) - 1, "what was made twice is counted"


def test_repeated_prefetch_failure_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(original_calls, "_warn_once", OncePerCause())
    tries: list[str] = []

    def first_of_each(request: Request) -> bool:
        tries.append(request.id)
        return len(set(tries)) % 2 == 1

    slow = EngineProfile({K.EMBEDDING: Curve(((1, 0.1), (2, 0.1)))})
    with EnginePool.local(
        [FakeEmbedder("embedder", slow, faults=Faults(fail_on=first_of_each, retryable=False))]
    ) as pool:
        for _ in range(2):
            graph = Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$text")))], Ref("e"))
            run = pool.runtime.submit(Query({"text": "a"}), graph, {}, has_original=True)
            assert run.call(K.EMBEDDING, "embedder", [EmbedText("a")]).result(5)
            run.close()
    [warning] = [one for one in caplog.records if "was made again by the original" in one.getMessage()]
    assert warning.levelname == "WARNING" and "embedder" in warning.getMessage() and "failed" in warning.getMessage()
    assert "Answers are the same" in warning.getMessage()


def test_original_raises_the_error_of_a_repeated_failure() -> None:
    seen = Seen(faults=Faults(fail_on=lambda request: True, retryable=False))
    with seen.pool:
        run = seen.prefetch(Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$text"))), text="a")
        with pytest.raises(EngineError):
            run.call(K.EMBEDDING, "embedder", [EmbedText("a")]).result(5)
        assert seen.of(K.EMBEDDING) <= 2
        run.close()


def test_error_in_one_instruction_ends_only_its_query(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    perform = GraphDriver._carry_out

    def broken(self: GraphDriver, instruction: Any) -> None:
        if isinstance(instruction, Collect):
            raise ZeroDivisionError("ours")
        perform(self, instruction)

    monkeypatch.setattr(GraphDriver, "_carry_out", broken)
    each = Graph([Primitive("v", K.EMBEDDING, "embedder", named(texts=Ref("$item")))], Ref("v"))
    holder = Primitive("each", K.MAP, inputs=named(items=Ref("$items")), fragment=_fragment(each))
    bad = seen.pool.runtime.submit(Query({"items": ["a", "b"]}), Graph([holder], Ref("each")), {})
    good = seen.pool.runtime.submit(
        Query({"text": "a"}),
        Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$text")))], Ref("e")),
        {},
    )
    assert good.output.result(5) is not None
    with pytest.raises((QueryError, ZeroDivisionError)):
        bad.output.result(5)
    assert "please report it" in caplog.text


def _fragment(graph: Graph) -> Any:
    from teola_plugin.graph import Fragment

    return Fragment(graph, graph.output)


def test_query_error_lists_the_outcome_of_each_primitive() -> None:
    seen = Seen(faults=Faults(fail_on=lambda request: request.kind is K.SEARCHING, retryable=False))
    with seen.pool:
        embed = Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$text")))
        search = SEARCH.with_(inputs=named(vectors=Ref("e")))
        run = seen.pool.runtime.submit(Query({"text": "a"}), Graph([embed, search], Ref("found")), {})
        with pytest.raises(QueryError) as caught:
            run.output.result(5)
    [first, second] = caught.value.story
    assert first.startswith("e at embedder: done") and second.startswith("found at store: failed")


# ---------------------------------------------------------------- terms


def test_call_outside_a_query_uses_given_or_ambient_context(seen: Seen) -> None:
    seen.pool.call(K.EMBEDDING, "embedder", [EmbedText("a")], request_context=RequestContext("acme")).result(5)
    token = current_request_context.set(RequestContext("ambient"))
    seen.pool.call(K.EMBEDDING, "embedder", [EmbedText("b")]).result(5)
    current_request_context.reset(token)
    seen.pool.call(K.EMBEDDING, "embedder", [EmbedText("c")]).result(5)
    assert [request.tenant for request in seen.requests] == ["acme", "ambient", ""]


def test_call_after_its_query_keeps_the_tenant(seen: Seen) -> None:
    run = seen.pool.runtime.watch(Query({"input": None}, tenant="acme"))
    run.close()
    run.call(K.EMBEDDING, "embedder", [EmbedText("a")]).result(5)
    assert [request.tenant for request in seen.requests] == ["acme"]


# ---------------------------------------------------------------- memory, others


def test_open_query_keeps_a_bounded_number_of_claims(seen: Seen) -> None:
    run = seen.prefetch(SEARCH)
    for number in range(600):
        run.call(K.PREFILLING, "llm", [Generate(Prompt(text=f"{number}"))]).result(5)
    works = seen.pool.runtime._driver.engines.table
    held = works._queries[run.id]
    assert len(list(held.claims)) <= 300 and len(held.open) == 0
    run.close()


def test_endless_function_does_not_block_other_calls(seen: Seen) -> None:
    over = threading.Event()
    stuck = Primitive("stuck", K.CALL, inputs=named(value=Ref("$input")), call="stuck")
    prompt = (PromptPart.var("value"),)
    behind = Primitive("lead", K.PREFILLING, "llm", named(value=Ref("stuck")), call="lead", prompt=prompt)
    run = seen.pool.runtime.submit(
        Query({"input": "a"}),
        Graph([stuck, behind], Ref("lead")),
        {"stuck": lambda value: over.wait()},
        has_original=True,
    )
    for number in range(5):
        seen.pool.call(K.EMBEDDING, "embedder", [EmbedText(str(number))]).result(5)
    run.call(K.EMBEDDING, "embedder", [EmbedText("its own")]).result(5)
    over.set()
    run.close()


# ---------------------------------------------------------------- pieces


class Fickle(ScriptedLLM):
    """Fails once, in the middle of an answer, and says something else when it is asked again."""

    async def execute(self, batch: Any) -> Any:
        for request in batch:
            self.requests.append(request.payload)
            words = ["one ", "two"] if len(self.requests) == 1 else ["three ", "four"]
            for word in words[: len(self.requests)]:
                yield Piece(request.id, word)
            if len(self.requests) == 1:
                yield Failed(request.id, EngineError("it fell.", engine="llm", retryable=True))
            else:
                yield Done(request.id, Generation("".join(words), "stop", 1, 2))


@pytest.mark.parametrize("early", [False, True])
def test_changed_retry_fails_only_readers_that_are_not_speculative(early: bool) -> None:
    """A reader that takes pieces as the result cannot get other ones. A reader that only predicts from them can."""
    payload = Generate(Prompt(text="count"))

    def read_pieces(*, speculative: bool) -> tuple[str, CallHandle]:
        with EnginePool.local(llm=Fickle()) as pool:
            lead = Primitive("lead", K.PREFILLING, "llm", named(value=Ref("$input")), call="lead")
            text = Primitive("text", K.DECODING, "llm", named(lead=Ref("lead")))
            ahead = Graph([lead, text], Ref("text"))
            if early:
                run = pool.runtime.submit(
                    Query({"input": ""}), ahead, {"lead": lambda given: payload}, has_original=True
                )
            else:
                run = pool.runtime.watch(Query({"input": None}), joins=True)
            handle = pool.call(K.PREFILLING, "llm", [payload], stream=True, speculative=speculative, run=run)
            pieces = "".join(piece.text for piece in handle.pieces)
            handle.result(5)
            run.close()
        return pieces, handle

    pieces, handle = read_pieces(speculative=True)
    assert handle.result()[0].text == "three four" and not pieces.startswith("two")
    if not early:
        with pytest.raises(EngineError, match="another one than that which was passed on"):
            read_pieces(speculative=False)
