"""Tests that LlamaIndex engines from the documentation behave like the original, on a pool and with own models.

They compare answers, passages with scores and order, types, prompts, both kinds of events, spans and errors.
"""

from __future__ import annotations

import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from differential.llamaindex import composed, retrieval, synthesis
from differential.llamaindex.compare import CUT, WAYS, Seen, differences, see
from differential.llamaindex.recording import Recorder
from llama_index.core.base.response.schema import Response
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import QueryBundle
from support.versions import needs_current_llama_index

from benchmarks.llamaindex.engines import ASKED
from benchmarks.llamaindex.kits import Kit, Sizes, bound_kit, own_kit, pool_kit
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.errors import RegistrationError

LONG = bool(os.environ.get("TEOLA_TEST_LONG"))
SMALL = Sizes(chunks=14, chunk_tokens=30, answer=8)


@dataclass(frozen=True)
class Case:
    make: Callable[..., Any]
    ways: tuple[str, ...]
    parts: bool = False
    """Whether the parts are accelerated, and not the whole."""

    @property
    def given(self) -> str:
        """Return the query, which decides what the model answers."""
        return ASKED[: 20 + zlib.crc32(_name(self).encode()) % 70]


def _name(case: Case) -> str:
    return next(name for name, one in CASES.items() if one is case)


QUERY = ("query", "aquery")
OTHERS = ("retrieve", "synthesize", "asynthesize", "query_bundle")
CASES: dict[str, Case] = {
    **{
        name: Case(make, QUERY + OTHERS)
        for name, make in {**synthesis.ENGINES, **synthesis.STREAMING, **retrieval.ENGINES, **composed.ENGINES}.items()
    },
    **{name: Case(make, ("retrieve", "aretrieve")) for name, make in retrieval.RETRIEVERS.items()},
    **{name: Case(make, ("synthesize", "asynthesize")) for name, make in synthesis.SYNTHESIZERS.items()},
    **{name: Case(make, ("chat", "achat", "stream_chat", "astream_chat")) for name, make in composed.CHAT.items()},
    **{name: Case(make, ("run",)) for name, make in composed.WORKFLOWS.items()},
    **{f"{name}, its parts": Case(make, ("run",), parts=True) for name, make in composed.WORKFLOWS.items()},
}


@dataclass(frozen=True)
class Bench:
    kit: Kit
    recorder: Recorder


def make_bench(name: str) -> Bench:
    recorder = Recorder()
    manager = CallbackManager([recorder])
    machine = profiles.noop()
    if name == "pool":
        return Bench(pool_kit(machine, SMALL, manager), recorder)
    return Bench(own_kit(machine, SMALL, manager, chat=name == "chat"), recorder)


KITS = ("own", "chat", "pool")


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    made = {name: make_bench(name) for name in KITS}
    yield made
    for one in made.values():
        if one.kit.pool is not None:
            one.kit.pool.close()


@pytest.fixture(params=KITS)
def bench(request: pytest.FixtureRequest, benches: dict[str, Bench]) -> Iterator[Bench]:
    found = benches[request.param]
    with found.kit.in_force():
        yield found
    found.kit.ledger.mend()


def all_cases(*, first: bool = False) -> pytest.MarkDecorator:
    """Return a mark that runs a test for every kit and case.

    With `first`, each case has its two main ways, and one of the others in turn. Otherwise each has one of the main
    ways, and one of the kits without a pool. The long version takes all ways.
    """
    cases = []
    for k, kit in enumerate(KITS):
        for i, (name, case) in enumerate(CASES.items()):
            main, others = case.ways[:2], case.ways[2:]
            if LONG:
                ways = case.ways
            elif first:
                ways = (*main, *others[(i + k) % len(others) :][:1]) if others else main
            else:
                ways = (main[(i + k) % len(main)],) if kit == "pool" or i % 2 == k else ()
            cases += [(kit, name, way) for way in ways]
    return pytest.mark.parametrize(("bench", "name", "way"), cases, indirect=["bench"])


def ask(bench: Bench, engine: Any, way: str, case: Case) -> Seen:
    return see(bench.kit, bench.recorder, engine, way, case.given)


Reached = tuple[list[str], list[str]]
_plain: dict[Any, tuple[Seen, Reached]] = {}
"""What the plain engines did, and what reached their models; it is looked at by more than one test."""


def call_original(bench: Bench, name: str, way: str) -> tuple[Seen, Reached]:
    """Return a call of the original on a new engine, with prompts and texts in their order."""
    case, ledger = CASES[name], bench.kit.ledger
    key = (bench.kit.name, name, way, ledger.fault)
    if key not in _plain:
        seen = ask(bench, case.make(bench.kit), way, case)
        _plain[key] = seen, (list(ledger.prompts), list(ledger.texts))
    return _plain[key]


def both(bench: Bench, name: str, way: str, **options: Any) -> tuple[Seen, Seen]:
    """Return a call of the original and one of the accelerated engine.

    Each has a new engine, because some keep state.
    """
    before = call_original(bench, name, way)[0]
    return before, ask(bench, fast(bench, CASES[name], **options), way, CASES[name])


def fast(bench: Bench, case: Case, *, bind: Sequence[tuple[Any, str]] = (), **options: Any) -> Any:
    """Return the accelerated engine, or the engine with accelerated parts."""
    given = {"pool": bench.kit.pool, "concurrent": bench.kit.concurrent, **options}

    def sooner(engine: Any) -> Any:
        if not bind:
            return accelerate(engine, **given)
        for pairs in (bind, *([pair] for pair in bind)):
            with suppress(RegistrationError):  # some use one of the models only
                return accelerate(engine, bind=pairs, **given)
        return engine

    return case.make(bench.kit, sooner) if case.parts else sooner(case.make(bench.kit))


RACED = {"sub_questions_deep"}
"""One of its parts may fail and be swallowed; how far the parts beside it got is a race, in the plain engine too."""


def same(before: Seen, after: Seen, *, merged: bool, only: str | tuple[str, ...] = "") -> None:
    """Fail if two calls differ. With `only`, other differences than those that begin with this text do not count."""
    if found := [one for one in differences(before, after, merged=merged) if one.startswith(only)]:
        pytest.fail("\n".join(one[:4000] for one in found), pytrace=False)


@all_cases(first=True)
def test_engine_behaves_as_the_original(bench: Bench, name: str, way: str) -> None:
    before, after = both(bench, name, way)
    same(before, after, merged=bench.kit.pool is not None)


@all_cases()
def test_engine_with_speculate_all_behaves_as_the_original(bench: Bench, name: str, way: str) -> None:
    before, after = both(bench, name, way, speculate="all")
    same(before, after, merged=True)


# ------------------------------------------------------------ the user's own models, on engines


@pytest.fixture(scope="module")
def bound() -> Iterator[Bench]:
    """Return own models, and engines that give their answers."""
    recorder = Recorder()
    kit = bound_kit(profiles.noop(), SMALL, CallbackManager([recorder]))
    yield Bench(kit, recorder)
    assert kit.pool is not None
    kit.pool.close()


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name, case in CASES.items() for way in (case.ways if LONG else case.ways[:1])],
)
def test_engine_with_bound_models_gives_the_originals_answers(bound: Bench, name: str, way: str) -> None:
    """The same answers, passages, prompts and texts. Events tell of other objects: those that took their places."""
    case = CASES[name]
    with bound.kit.in_force():
        seen = (
            ask(bound, case.make(bound.kit), way, case),
            ask(bound, fast(bound, case, bind=bound.kit.bind), way, case),
        )
    before, after = (replace(one, result=_without_model_metadata(one.result.replace(CUT, ""))) for one in seen)
    same(before, after, merged=True, only=("result", "prompts", "texts"))


def _without_model_metadata(result: str) -> str:
    """Return a text without the model's metadata, which agents pass on."""
    return re.sub(r"(AgentOutput\(current_agent_name='\w+', raw=)(None|\{.*?\}\}),", r"\1#,", result)


# ------------------------------------------------------------ faults


def ends(some: list[Any]) -> list[Any]:
    """Return the first and the last item, or all in the long version."""
    return list(dict.fromkeys(some if LONG else some[:1] + some[-1:]))


def reached(bench: Bench, name: str, way: str) -> Reached:
    """Return prompts and texts of the original's call, in their order."""
    prompts, texts = call_original(bench, name, way)[1]
    return prompts, [text.partition(": ")[2] for text in texts]


def survived(bench: Bench, name: str, way: str) -> None:
    """Check for the same exception, or for the same end if the exception is swallowed."""
    before, after = both(bench, name, way)
    same(before, after, merged=bench.kit.pool is not None, only="result" if name in RACED else "")


@all_cases()
def test_failing_model_raises_the_originals_error(bench: Bench, name: str, way: str) -> None:
    for prompt in ends(reached(bench, name, way)[0]):
        bench.kit.ledger.broken_prompt = prompt
        survived(bench, name, way)


@needs_current_llama_index
@all_cases()
def test_failing_embedder_raises_the_originals_error(bench: Bench, name: str, way: str) -> None:
    for text in ends(reached(bench, name, way)[1]):
        bench.kit.ledger.broken_text = text
        survived(bench, name, way)


@needs_current_llama_index
@all_cases()
def test_failing_store_raises_the_originals_error(bench: Bench, name: str, way: str) -> None:
    bench.kit.ledger.broken_store = True
    survived(bench, name, way)


# ------------------------------------------------------------ many at a time


def test_eight_concurrent_queries_give_the_originals_results(bench: Bench) -> None:
    """Queries over all engines, from eight threads, half of them by the async way. Chats are not shared."""
    order = [(name, way) for name, case in CASES.items() for way in case.ways[:2]]
    random.Random(1).shuffle(order)
    shared = {name: fast(bench, case) for name, case in CASES.items() if _shared(case)}

    def fast_one(one: tuple[str, str]) -> str:
        name, way = one
        engine = shared[name] if name in shared else fast(bench, CASES[name])
        return outcome(engine, way, CASES[name].given)

    expected = {(name, way): call_original(bench, name, way)[0].result for name, way in order}
    with ThreadPoolExecutor(8) as threads:
        for one, found in zip(order, threads.map(fast_one, order), strict=True):
            assert found == expected[one], one


def _shared(case: Case) -> bool:
    return not {"chat", "run"} & set(case.ways)


def outcome(engine: Any, way: str, given: str) -> str:
    return WAYS[way](engine, given)


# ------------------------------------------------------------ the harness


@all_cases()
def test_two_runs_of_the_original_engine_are_equal(bench: Bench, name: str, way: str) -> None:
    """The control: what is compared does not differ by itself."""
    case = CASES[name]
    same(call_original(bench, name, way)[0], ask(bench, case.make(bench.kit), way, case), merged=False)


class Wrong:
    """An accelerated engine that is not faithful."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def query(self, given: Any) -> Any:
        return self.spoil(given)

    def spoil(self, given: Any) -> Any:
        raise NotImplementedError


class OtherAnswer(Wrong):
    def spoil(self, given: Any) -> Any:
        found = self.engine.query(given)
        return replace(found, response=f"{found.response} ")


class OtherType(Wrong):
    def spoil(self, given: Any) -> Any:
        return str(self.engine.query(given))


class OtherOrder(Wrong):
    def spoil(self, given: Any) -> Any:
        found = self.engine.query(given)
        return replace(found, source_nodes=found.source_nodes[::-1])


class OtherScore(Wrong):
    def spoil(self, given: Any) -> Any:
        found = self.engine.query(given)
        found.source_nodes[0].score += 1e-9
        return found


class NoMetadata(Wrong):
    def spoil(self, given: Any) -> Any:
        return replace(self.engine.query(given), metadata=None)


class NoEvents(Wrong):
    def spoil(self, given: Any) -> Any:
        return self.engine._query(QueryBundle(given))


class AsksTwice(Wrong):
    def spoil(self, given: Any) -> Any:
        nodes = self.engine.retrieve(QueryBundle(given))
        return self.engine.synthesize(QueryBundle(given), nodes + nodes[:1])


class OwnSpan(Wrong):
    def spoil(self, given: Any) -> Any:
        self.engine.callback_manager.start_trace("mine")
        return self.engine.query(given)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (OtherAnswer, "result"),
        (OtherType, "result"),
        (OtherOrder, "result"),
        (OtherScore, "result"),
        (NoMetadata, "result"),
        (NoEvents, "events"),
        (NoEvents, "spans"),
        (AsksTwice, "prompts"),
        (OwnSpan, "callbacks"),
    ],
)
def test_comparison_detects_an_unfaithful_engine(bench: Bench, wrong: type[Wrong], what: str) -> None:
    case = CASES["refine"]
    before, after = (ask(bench, made(case.make(bench.kit)), "query", case) for made in (lambda x: x, wrong))
    assert any(found.startswith(what) for found in differences(before, after, merged=bench.kit.pool is not None))


class Swallows(Wrong):
    def spoil(self, given: Any) -> Any:
        try:
            return self.engine.query(given)
        except Exception:
            return Response("None")


class OtherError(Wrong):
    def spoil(self, given: Any) -> Any:
        try:
            return self.engine.query(given)
        except Exception as error:
            raise type(error)("something else") from error


@pytest.mark.parametrize("wrong", [Swallows, OtherError])
def test_comparison_detects_a_wrong_error(bench: Bench, wrong: type[Wrong]) -> None:
    case = CASES["refine"]
    bench.kit.ledger.broken_store = True
    before = ask(bench, case.make(bench.kit), "query", case)
    assert before.failed and differences(before, ask(bench, wrong(case.make(bench.kit)), "query", case))


@needs_current_llama_index
def test_error_swallowed_by_the_original_stays_swallowed(bench: Bench) -> None:
    """The faults reach what swallows them: a sub-question fails, the answer is made of the others."""
    prompts, _ = reached(bench, "sub_questions", "query")
    bench.kit.ledger.broken_prompt = prompts[1]
    before, after = both(bench, "sub_questions", "query")
    assert not before.failed and not differences(before, after, merged=True)


def test_comparison_requires_extra_requests_to_be_counted_as_wasted() -> None:
    """Early work beyond what the trace admits is caught, and a text never embedded; once instead of twice is fine."""

    def with_(prompts: list[str], texts: list[str], wasted: int = 0) -> Seen:
        return Seen("", False, Counter(), Counter(), Counter(), Counter(prompts), Counter(texts), wasted)

    before = with_(["p"], ["t", "t", "u"])
    assert not differences(before, with_(["p", "q"], ["t", "u"], wasted=1), merged=True)
    assert differences(before, with_(["p", "q"], ["t", "u"]), merged=True)
    assert differences(before, with_(["p"], ["t"]), merged=True)
    assert differences(before, with_(["p"], ["t", "u"]))


def test_suite_has_35_engines_that_call_a_model(bench: Bench) -> None:
    """At least 35 engines, and each but three asks a model or an embedder something."""
    assert len(CASES) >= 35
    silent = {name for name, case in CASES.items() if not any(reached(bench, name, case.ways[0]))}
    assert silent == set()
