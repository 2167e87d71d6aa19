"""The contract of a runtime as tests: subclass `RuntimeConformance` in a test module, and pytest runs them all.

A runtime executes e-graphs and single calls on engines, wherever those are. The pool must have fake engines without
latency named `llm`, `embedder`, `reranker` and `store`, and one more embedder, `slow`, whose every batch takes a
quarter of a second. (Fakes, because the contract is about order, ends and errors; what real engines answer is for
other tests.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import EngineError, QueryCancelled, QueryTimeout, TeolaError
from teola_plugin.graph import Attributes, Graph, Primitive, PrimitiveKind, Query, Ref, named
from teola_plugin.requests.payloads import EmbedText, Generate, Generation, Message, Prompt, Sampling

if TYPE_CHECKING:
    from teola_plugin.pool import EnginePool

_K = PrimitiveKind
_SECONDS = 30.0


def embedding(name: str, engine: str, text: Ref, *after: str) -> Primitive:
    return Primitive(name, _K.EMBEDDING, engine, named(texts=text), after=after)


def chain(length: int, *engines: str) -> Graph:
    """Embeddings one after the other, the engines in turn; the last is the output."""
    steps = [
        embedding(f"e{i}", engines[i % len(engines)], Ref("$input", (i,)), *([f"e{i - 1}"] if i else []))
        for i in range(length)
    ]
    return Graph(steps, Ref(f"e{length - 1}"))


def search() -> Graph:
    """Embed two texts, store them, and search with the embedding of a third: every value goes to another engine."""
    embed = Primitive("embed", _K.EMBEDDING, "embedder", named(texts=Ref("$input", ("texts",))), batchable=True)
    question = embedding("question", "embedder", Ref("$input", ("question",)))
    attributes = Attributes(collection="conformance", k=2)
    store = Primitive(
        "store",
        _K.INGESTION,
        "store",
        named(chunks=Ref("$input", ("chunks",)), vectors=Ref("embed")),
        batchable=True,
        attributes=attributes,
    )
    inputs = named(vectors=Ref("question"))
    hits = Primitive("found", _K.SEARCHING, "store", inputs, after=("store",), attributes=attributes)
    return Graph([embed, question, store, hits], Ref("found"))


class RuntimeConformance:
    """Supply `pool`: a context manager that gives a started pool; it may be shared by all tests."""

    @contextmanager
    def pool(self) -> Iterator[EnginePool]:
        raise NotImplementedError
        yield

    # ------------------------------------------------------------ results

    def test_a_chain_gives_the_value_of_its_last_primitive(self) -> None:
        texts = [f"text {i}" for i in range(20)]
        with self.pool() as pool:
            for engines in (("embedder",), ("embedder", "slow")):
                length = 20 if len(engines) == 1 else 3
                run = pool.runtime.submit(Query({"input": texts}), chain(length, *engines), {})
                expected = pool.call(_K.EMBEDDING, "embedder", [EmbedText(texts[length - 1])]).result(_SECONDS)[0]
                assert list(run.output.result(_SECONDS)) == list(expected)

    def test_primitives_of_a_chain_run_in_its_order(self) -> None:
        with self.pool() as pool:
            run = pool.runtime.submit(Query({"input": list("abcdefgh")}), chain(8, "embedder", "slow"), {})
            run.output.result(_SECONDS)
            trace = run.trace.result(_SECONDS)
            assert trace is not None and trace.outcome == "done"
            ends = {span.primitive: span.done for span in trace.spans}
            order = [ends[f"e{i}"] or 0.0 for i in range(8)]
            assert order == sorted(order) and order[0]

    def test_values_go_from_engine_to_engine(self) -> None:
        from teola_plugin.requests.payloads import Chunk

        texts = ["a cat sits on a mat", "stocks fell today"]
        chunks = [Chunk(f"c{i}", text) for i, text in enumerate(texts)]
        inputs = {"texts": texts, "chunks": chunks, "question": "where sits a cat"}
        with self.pool() as pool:
            for _ in range(2):
                hits = pool.runtime.submit(Query({"input": inputs}), search(), {}).output.result(_SECONDS)
                assert [hit.id for hit in hits] == ["c0", "c1"]
                pool.admin("store", "delete_collection", "conformance").result(_SECONDS)

    def test_many_queries_at_once(self) -> None:
        with self.pool() as pool:
            expected = {}
            for i in range(8):
                [expected[i]] = pool.call(_K.EMBEDDING, "embedder", [EmbedText(f"{i}")]).result(_SECONDS)
            runs = [
                (i % 8, pool.runtime.submit(Query({"input": [f"{i % 8}"] * 6}), chain(6, "embedder"), {}))
                for i in range(48)
            ]
            assert all(list(run.output.result(_SECONDS)) == list(expected[i]) for i, run in runs)

    def test_calls_from_many_threads_and_loops(self) -> None:
        ask = [EmbedText("the same")]

        def sync(pool: EnginePool) -> list[float]:
            return list(pool.call(_K.EMBEDDING, "embedder", ask).result(_SECONDS)[0])

        async def awaited(pool: EnginePool) -> list[float]:
            return list((await pool.call(_K.EMBEDDING, "embedder", ask))[0])

        with self.pool() as pool, ThreadPoolExecutor(8) as threads:
            vectors = list(threads.map(lambda i: sync(pool) if i % 2 else asyncio.run(awaited(pool)), range(16)))
            assert all(vector == vectors[0] for vector in vectors)

    # ------------------------------------------------------------ streams

    def test_pieces_make_up_the_text(self) -> None:
        with self.pool() as pool:
            handle = pool.call(_K.PREFILLING, "llm", [_ask("tell me more")], stream=True)
            pieces = [piece.text for piece in handle.pieces]
            [generation] = handle.result(_SECONDS)
            assert isinstance(generation, Generation) and generation.text == "".join(pieces)

    def test_who_comes_late_reads_the_whole_text(self) -> None:
        """A prefetched generation that nobody has read so far is claimed before it has ended, and after."""
        lead = Primitive("lead", _K.PREFILLING, "llm", named(question=Ref("$input")), call="ask")
        text = Primitive("text", _K.DECODING, "llm", named(prefilling=Ref("lead")))
        payload = Generate(Prompt(text="what nobody reads"))
        with self.pool() as pool:
            graph = Graph([lead, text], Ref("text"))
            run = pool.runtime.submit(Query({"input": ""}), graph, {"ask": lambda _: payload}, has_original=True)
            handles = [run.call(_K.PREFILLING, "llm", [payload], stream=True)]
            [generation] = handles[0].result(_SECONDS)
            handles.append(run.call(_K.PREFILLING, "llm", [payload], stream=True))
            for handle in handles:
                assert generation.text == "".join(piece.text for piece in handle.pieces)
            run.close()

    def test_equal_questions_have_equal_answers(self) -> None:
        with self.pool() as pool:
            answers = [pool.call(_K.PREFILLING, "llm", [_ask("again")]).result(_SECONDS)[0].text for _ in range(3)]
            assert len(set(answers)) == 1

    # ------------------------------------------------------------ claims

    def test_original_claims_a_prefetched_result(self) -> None:
        graph = Graph([embedding("e", "slow", Ref("$input"))], Ref("e"))
        with self.pool() as pool:
            run = pool.runtime.submit(Query({"input": "claimed"}), graph, {}, has_original=True)
            first = run.call(_K.EMBEDDING, "slow", [EmbedText("claimed")]).result(_SECONDS)
            second = run.call(_K.EMBEDDING, "slow", [EmbedText("claimed")]).result(_SECONDS)
            assert list(first[0]) == list(second[0]) and pool.runtime.request_count(run.id) == 1
            run.close()

    def test_later_subplan_adopts_requests_of_an_earlier_one(self) -> None:
        graph = Graph([embedding("e", "slow", Ref("$input"))], Ref("e"))
        with self.pool() as pool:
            run = pool.runtime.watch(Query({"input": None}), joins=True)
            first, second = (
                run.begin_subplan(graph, {}, "adopted", depth=3, gang="both", lookahead=True) for _ in range(2)
            )
            first.close()
            [vector] = run.call(_K.EMBEDDING, "slow", [EmbedText("adopted")]).result(_SECONDS)
            assert len(vector) and pool.runtime.request_count(run.id) == 1
            second.close()
            run.close()
            trace = run.trace.result(_SECONDS)
            assert trace is not None and trace.wasted() == (0, 0)

    def test_what_no_part_wants_any_more_frees_the_engine(self) -> None:
        graph = Graph([embedding("e", "slow", Ref("$input"))], Ref("e"))
        with self.pool() as pool:
            run = pool.runtime.watch(Query({"input": None}), joins=True)
            for number in range(3):
                run.begin_subplan(graph, {}, f"given up {number}", lookahead=True).close()
            assert run.call(_K.EMBEDDING, "slow", [EmbedText("wanted")]).result(_SECONDS)
            assert pool.runtime.request_count(run.id) == 0
            run.close()

    # ------------------------------------------------------------ ends

    def test_a_wrong_value_fails_the_query_and_nothing_else(self) -> None:
        graph = Graph([embedding("e", "embedder", Ref("$input"))], Ref("e"))
        with self.pool() as pool:
            failed = pool.runtime.submit(Query({"input": 7}), graph, {}).output.exception(_SECONDS)
            assert isinstance(failed, TypeError)
            assert pool.runtime.submit(Query({"input": "x"}), graph, {}).output.result(_SECONDS) is not None

    def test_a_bad_request_fails_with_an_error_of_ours(self) -> None:
        with self.pool() as pool:
            error = _raised(lambda: pool.call(_K.EMBEDDING, "embedder", ["no payload"]).result(_SECONDS))
            assert isinstance(error, EngineError)

    def test_a_cancelled_query_ends_and_frees_the_engine(self) -> None:
        graph = Graph([embedding("e", "slow", Ref("$input"))], Ref("e"))
        with self.pool() as pool:
            runs = [pool.runtime.submit(Query({"input": f"c{i}"}), graph, {}) for i in range(3)]
            for run in runs[:2]:
                run.cancel()
            assert all(isinstance(run.output.exception(_SECONDS), QueryCancelled) for run in runs[:2])
            assert runs[2].output.result(_SECONDS) is not None

    def test_a_passed_deadline_ends_the_query(self) -> None:
        graph = Graph([embedding("e", "slow", Ref("$input"))], Ref("e"))
        with self.pool() as pool:
            run = pool.runtime.submit(Query({"input": "late"}, deadline=pool.runtime.time() + 0.05), graph, {})
            assert isinstance(run.output.exception(_SECONDS), QueryTimeout)

    def test_an_unknown_engine_is_named(self) -> None:
        with self.pool() as pool:
            error = _raised(lambda: pool.call(_K.EMBEDDING, "embeder", [EmbedText("x")]))
            assert isinstance(error, TeolaError) and "embedder" in str(error)


def _ask(text: str) -> Generate:
    return Generate(Prompt((Message("user", text),)), Sampling(max_tokens=12))


def _raised(work: Callable[[], Any]) -> BaseException | None:
    """Call a function, and return what it raised; None if it raised nothing."""
    try:
        work()
    except BaseException as error:
        return error
    return None
