"""Workflows of the five applications in virtual time, with one thing changed at a time: what the ablations run.

The form of the workflow API has no plain object beside its graph, so its passes can be taken away one by one. Engines
are those of `--ground profile`: an RTX 3090 for each model, two replicas of each LLM, a search of half a second
(a guess), the agent's tools at once. Every upload is in a collection of its own.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.rag.apps import ITEM_TOKENS, document
from benchmarks.rag.texts import written
from examples.apps import engines as answers
from examples.apps import prompts, workflows
from teola_plugin import EnginePool
from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, FakeWebSearch, own_score
from teola_plugin.engines.profiles import drafting, rtx3090, scaled, web_search
from teola_plugin.observe import QueryTrace
from teola_plugin.observe.svg import family
from teola_plugin.requests.payloads import Prompt, Sampling
from teola_plugin.simulation import Arrival, Cluster, Make, Run, figures, poisson, simulate
from teola_plugin.workflow import Embedding, Flow, Workflow

PARAGRAPHS = {"naive_rag": 50, "advanced_rag": 50, "contextual_retrieval": 6}
"""Of an upload, two chunks each. Contextual retrieval asks its model about every chunk."""
ORDER = ("decoding", "prefilling", "reranking", "searching", "ingestion", "embedding")
"""Kinds of engine work, the ones that hold up an answer first. A search of the web is a search."""
ALONE = 60.0
"""Seconds between queries at rate 0: nobody meets another one, prefixes that all have stay in the caches."""
COPIED = re.compile(r"Passage:\n(.*?)\n\n(?:Earlier answer: (.*?)\n\nBetter answer:|Answer:)", re.DOTALL)
"""Of a prompt of the applications: what an answer copies from."""

EXPANDING = str(prompts.EXPAND.messages[0].prompt.template)[:60]  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class Ground:
    """The engines of a run. `drafts`: tokens that LLMs verify at once. `copied`: share of an answer's tokens that are
    taken from its prompt. `tokens`: of an answer, which its call may cut. `slots`: requests at once on an LLM.
    `scale`: latencies, times this."""

    policy: str = "topology-aware"
    caching: bool = True
    drafts: int = 0
    copied: float = 0.0
    tokens: int = 24
    interference: float | None = None
    slots: int | None = None
    scale: float = 1.0

    def made(self) -> dict[str, list[Engine]]:
        machine = scaled(drafting(rtx3090(), self.drafts) if self.drafts else rtx3090(), self.scale)
        known: dict[str, Any] = {"interference": self.interference, "max_requests": self.slots}
        said = {name: value for name, value in known.items() if value is not None}
        model = replace(machine["llm"], prefix_caching=self.caching, **said)

        def llms(name: str) -> list[Engine]:
            return [FakeLLM(name, replace(model, device=f"{name}{n}"), self.answer) for n in range(2)]

        return {
            "llm": llms("llm"),
            "proxy": llms("proxy"),
            "embedder": [FakeEmbedder("embedder", machine["embedder"])],
            "reranker": [FakeReranker("reranker", machine["reranker"], own_score)],
            "store": [FakeStore("store", machine["store"])],
            "web": [FakeWebSearch("web", web_search(0.5 * self.scale), [page["text"] for page in answers.PAGES])],
        }

    def answer(self, prompt: Prompt, sampling: Sampling) -> str:
        """Words that depend on the prompt; of an expansion, three questions of a realistic length."""
        if sampling.json_schema:
            return answers.answer(prompt, sampling)
        text, tokens = prompt.flat(), min(sampling.max_tokens, self.tokens)
        if EXPANDING in text:
            words = answers.asked_words(text)
            return "\n".join(written(f"{text}{line}", ITEM_TOKENS, 0.0, words) for line in range(3))
        found = COPIED.search(text)
        passage, earlier = (" ".join((part or "").split()) for part in found.groups()) if found else ("", "")
        marked = f"Passage: {passage}" + (f"\nAn answer without this passage: {earlier}" if earlier else "")
        return written(f"{text}\n{marked}", tokens, self.copied if passage else 0.0, answers.WORDS)


def engine(name: str, scale: float = 1.0) -> Engine:
    """One replica, for a pool elsewhere."""
    return Ground(scale=scale).made()[name][0]


@dataclass(frozen=True, slots=True)
class _Made(Cluster):
    """What `simulate` takes a ground as."""

    ground: Ground = Ground()

    @property
    def policies(self) -> dict[str, str]:
        return dict.fromkeys(("llm", "proxy", "embedder", "reranker", "store", "web"), self.ground.policy)

    def make_engines(self, lengths: Mapping[str, int] | None = None) -> dict[str, list[Engine]]:
        return self.ground.made()


@dataclass(frozen=True, slots=True)
class Case:
    """A run: apps on one ground. `passes`: None for those of every pool. `rate`: queries a second of all apps
    together; 0 for one at a time. `by_hand`: LlamaDistPC's modules, side by side where they do not need each other."""

    apps: tuple[str, ...]
    rate: float = 0.0
    passes: tuple[str, ...] | None = None
    ground: Ground = Ground()
    by_hand: bool = False
    queries: int = 100
    seed: int = 0
    paragraphs: int = 0
    """Of an upload; 0 for those of `PARAGRAPHS`."""


def by_hand(app: str) -> Workflow:
    """A question about an upload as LlamaDistPC has it: indexing beside what does not need the index."""
    flow = workflows.WORKFLOWS[app]("proxy").flow
    parts = {one.name: one for one in flow}
    if app == "naive_rag":
        parts["found"] = replace(parts["found"], query="vector")  # type: ignore[call-arg]
        flow = Flow.combine([Flow.of(parts["index"]), Flow.of(Embedding("vector", texts="question"))])
    elif app == "advanced_rag":
        flow = Flow.combine([Flow.of(parts["index"]), Flow.of(parts["queries"])])
    else:
        raise KeyError(f"{app} has no form by hand")
    for name in ("found", "best", "answer"):
        flow = flow >> parts[name] if name in parts else flow
    return Workflow(app, flow)


def arrivals(case: Case) -> list[Arrival]:
    """Apps take turns; everybody meets the same ones."""
    times: Iterator[float] = poisson(case.rate, case.seed) if case.rate else itertools.count(0.0, ALONE)
    apps = itertools.cycle(case.apps)
    return [
        Arrival(at, app, given(app, case.seed * case.queries + number, case.paragraphs))
        for number, (at, app) in enumerate(zip(itertools.islice(times, case.queries), apps, strict=False))
    ]


def given(app: str, number: int, paragraphs: int = 0) -> dict[str, str]:
    """The input of one query; no two are alike."""
    asked = {"question": f"What does report {number} say about the terms that have to change first?"}
    if app in PARAGRAPHS:
        asked["document"] = document(number, paragraphs or PARAGRAPHS[app])
    return asked


def ran(case: Case) -> dict[str, Any]:
    """Figures of a run, and what the time of its last queries went to. Exits where a query fails."""
    pools: list[EnginePool] = []

    def made(app: str) -> Make:
        def make(pool: EnginePool) -> Any:
            pools[:] = [pool]
            workflow = by_hand(app) if case.by_hand else workflows.WORKFLOWS[app]("proxy")
            longest = {"answer": {"max_tokens": max(64, case.ground.tokens)}}
            return workflow.deploy(pool, passes=case.passes, config=longest).arun

        return make

    run = simulate(_Made({}, case.ground), {app: made(app) for app in case.apps}, arrivals(case), seed=case.seed)
    if failed := [one.error for one in run.queries if one.error]:
        raise SystemExit(f"{case}: {failed[0]}")
    return told(run) | {"spent": spent(pools[0])}


def virtual_seconds(app: str, queries: int, scale: float = 1.0) -> list[float]:
    """Of queries one after the other, by every pass, where processors take no time."""

    def make(pool: EnginePool) -> Any:
        return workflows.WORKFLOWS[app]("proxy").deploy(pool).arun

    run = simulate(_Made({}, Ground(scale=scale)), {app: make}, arrivals(Case((app,), queries=queries)))
    return [one.seconds for one in run.queries]


def told(run: Run) -> dict[str, Any]:
    """Seconds and tokens of a query, on average."""
    found = figures(run, dict.fromkeys({one.app for one in run.queries}, 1.0))
    by_app = {name: one["latency"]["mean"] for name, one in found.get("apps", {}).items()}
    kept = ("queued", "work", "wasted", "wasted_tokens")
    busiest = max((max(each), name) for name, each in found["utilisation"].items())
    return {**found["latency"], **{name: found[name] for name in kept}, "by_app": by_app, "busiest": busiest[1]}


def spent(pool: EnginePool) -> dict[str, float]:
    """Mean seconds of a query by what ran, in the last traces that are kept. A moment in which several things ran
    counts for the first of `ORDER`; one in which nothing ran and something waited, as queued."""
    found = [one for one in map(_spent, pool.traces) if one]
    return {name: round(fmean(one.get(name, 0.0) for one in found), 4) for name in (*ORDER, "queued")}


def _spent(trace: QueryTrace) -> dict[str, float]:
    spans = [span for span in trace.spans if span.engine and span.started is not None and span.done is not None]
    times = sorted({moment for span in spans for moment in (span.queued, span.begin, span.done or 0.0)})
    found: dict[str, float] = {}
    for since, until in itertools.pairwise(times):
        running = {family(span.kind) for span in spans if span.begin <= since and until <= (span.done or 0.0)}
        waits = any(span.queued <= since and until <= span.begin for span in spans)
        name = next((one for one in ORDER if one in running), "queued" if waits else "")
        if name:
            found[name] = found.get(name, 0.0) + until - since
    return found


def run_all(
    cases: Sequence[Case], workers: int, kept: Path | None = None, done: Callable[[], object] = lambda: None
) -> dict[Case, dict[str, Any]]:
    """Runs of all cases, each once, in so many processes (1: in this one); `kept` has those of an earlier call that
    was broken off, and gets the others. Alike in every process: all is drawn from seeds."""
    names = {repr(case): case for case in cases}
    lines = kept.read_text().split("\n") if kept is not None and kept.exists() else []
    before = [json.loads(line) for line in lines if line]
    found = {names[one["case"]]: one["found"] for one in before if one["case"] in names}
    left = [case for case in names.values() if case not in found]
    for _ in found:
        done()
    for case, one in _results(left, workers):
        found[case] = one
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("a") as file:
                file.write(json.dumps({"case": repr(case), "found": one}) + "\n")
        done()
    return found


def _results(cases: Sequence[Case], workers: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """As they come."""
    if workers == 1:
        yield from map(_named, cases)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as processes:
        for coming in as_completed([processes.submit(_named, case) for case in cases]):
            yield coming.result()


def _named(case: Case) -> tuple[Case, dict[str, Any]]:
    return case, ran(case)
