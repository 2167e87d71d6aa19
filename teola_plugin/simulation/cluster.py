"""The simulated cluster: engines with the profile of some machine, their replicas and batch policies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teola_plugin.engines import machines
from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import (
    FakeEmbedder,
    FakeLLM,
    FakeReranker,
    FakeStore,
    FakeWebSearch,
    answer_words,
    own_score,
)
from teola_plugin.engines.fake.llm import default_answer
from teola_plugin.engines.profiles import from_json, web_search
from teola_plugin.errors import ConfigError, unknown_name
from teola_plugin.graph import EngineProfile
from teola_plugin.requests.payloads import Prompt, Sampling
from teola_plugin.scheduling.placement import RequestPlacement

if TYPE_CHECKING:
    from teola_plugin.cluster.config import EngineConfig

Machine = Mapping[str, EngineProfile]
"""Profiles by engine name, or by the kind of engine: llm, embedder, reranker, store."""

_LIKE = {"vllm": "llm", "openai": "llm", "embedding": "embedder", "reranking": "reranker", "pgvector": "store"} | {
    "websearch": "web",
    "fulltext": "web",
}
CACHE_TOKENS = 65_536
"""Size of an LLM's prefix cache if its profile has none."""
_MARK = re.compile(r"\bq\d{7}\b")
"""A word that tells queries apart (see `Arrival.mark`)."""


def mark(number: int) -> str:
    """Return the word of the query with that number."""
    return f"q{number:07d}"


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """One engine. `like`: llm, embedder, reranker, store, web or tools."""

    like: str
    profile: EngineProfile
    replicas: int = 1
    policy: str = "topology-aware"
    output_tokens: int = 0
    """Length of each answer of an LLM; 0 for 16 to 63, by the prompt. `max_tokens` of a call cuts longer ones."""
    make: Callable[[str, EngineProfile, int], Engine] | None = None
    """Makes a replica from (name, profile, number), if it answers differently from the shipped fake of its kind."""
    placement: Callable[[EngineProfile], RequestPlacement] | None = None
    """Chooses replicas in replays, instead of the scheduler's own placement."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Engines by name. A run leaves nothing in it: every run makes its engines anew."""

    engines: Mapping[str, SimulatedEngine]

    @classmethod
    def of(
        cls,
        machine: Machine,
        *,
        replicas: Mapping[str, int] | None = None,
        policy: str = "topology-aware",
        output_tokens: int = 0,
    ) -> Cluster:
        """Return the four usual engines of a machine, e.g. `Cluster.of(rtx3090(), replicas={"llm": 2})`."""
        counts = replicas or {}
        for name in counts:
            if name not in machine:
                raise unknown_name("engine", name, list(machine))
        return cls(
            {
                name: SimulatedEngine(name, profile, counts.get(name, 1), policy, output_tokens)
                for name, profile in machine.items()
            }
        )

    @classmethod
    def read(cls, path: str | Path, machine: Machine | None = None, *, output_tokens: int = 0) -> Cluster:
        """Return the cluster that a pool's YAML describes. Raises `ConfigError`.

        `machine` has the speed of its engines; fakes of the YAML have their own.
        """
        from teola_plugin.cluster.config import PoolConfig

        pool_config = PoolConfig.read(path)
        return cls(
            {
                name: _engine(name, config, machine, output_tokens, str(path))
                for name, config in pool_config.engines.items()
            }
        )

    def under(self, policy: str) -> Cluster:
        """Return a copy with one batch policy for all engines."""
        return Cluster({name: replace(one, policy=policy) for name, one in self.engines.items()})

    @property
    def policies(self) -> dict[str, str]:
        """Batch policies by engine."""
        return {name: one.policy for name, one in self.engines.items()}

    def make_engines(self, lengths: Mapping[str, int] | None = None) -> dict[str, list[Engine]]:
        """Return fresh replicas. `lengths` are the tokens of an LLM's answers in queries with such a mark in their
        prompts."""
        return {name: _replicas(name, one, lengths or {}) for name, one in self.engines.items()}


def machine_named(name: str) -> Machine:
    """Return a machine of `engines.machines`, or the profiles in a file that `teola calibrate --json` has written.

    Raises `ConfigError`.
    """
    if name in machines.MACHINES:
        return machines.MACHINES[name]()
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(
            f"there is no machine {name!r}.",
            hint=f"one of {', '.join(machines.MACHINES)}, or a file of `teola calibrate pool.yaml --json > FILE.json`",
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {engine: EngineProfile(**from_json(fields)) for engine, fields in data.items()}
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}.", hint="check the path after --machine") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{name} holds no profiles: {error!r}.", hint="write it with `teola calibrate pool.yaml --json`"
        ) from error


def _engine(
    name: str, config: EngineConfig, machine: Machine | None, output_tokens: int, source: str
) -> SimulatedEngine:
    """Return the simulated form of an engine in a pool's file, with its profile on the machine. Raise `ConfigError`."""
    like = str(config.options.get("like", name)) if config.kind == "fake" else _LIKE.get(config.kind or "", "")
    if not like:
        raise ConfigError(
            f"{source}: engine {name!r} is made by {config.factory or config.kind}, and nobody knows its speed.",
            hint="say kind: fake and options: {like: llm | embedder | reranker | store} in a copy for the simulator",
        )
    if config.kind == "fake" and (machine_name := str(config.options.get("machine", ""))):
        machine = machine_named(machine_name)
    if machine is None:
        raise ConfigError(
            f"{source}: nothing says how fast engine {name!r} is.",
            hint=f"give --machine: {', '.join(machines.MACHINES)}, or a file of `teola calibrate {source} --json`",
        )
    profile = machine.get(name) or machine.get(like) or (web_search() if like == "web" else None)
    if profile is None:
        raise ConfigError(
            f"{source}: the machine has no profile of engine {name!r}, nor of any {like}.",
            hint=f"it has {', '.join(sorted(machine))}: name engines as in the file, or give another --machine",
        )
    return SimulatedEngine(like, profile, config.replicas, config.policy, output_tokens)


def _replicas(name: str, engine: SimulatedEngine, lengths: Mapping[str, int]) -> list[Engine]:
    """Return new fake replicas of an engine. Those of a store share its rows. Raise `ConfigError` for another kind."""
    profile, make = engine.profile, engine.make
    if make is not None:
        return [make(name, profile, number) for number in range(engine.replicas)]
    if engine.like == "llm":
        answer, tokens = _answers(engine.output_tokens, lengths), profile.cache_tokens or CACHE_TOKENS
        return [FakeLLM(name, profile, answer, cache_tokens=tokens) for _ in range(engine.replicas)]
    if engine.like == "store":
        first = FakeStore(name, profile)
        return [first, *(FakeStore(name, profile, shares=first) for _ in range(engine.replicas - 1))]
    if engine.like not in _MAKERS:
        raise ConfigError(f"there is no fake engine like {engine.like!r}.", hint=f"llm, store, {', '.join(_MAKERS)}")
    return [_MAKERS[engine.like](name, profile) for _ in range(engine.replicas)]


def _reranker(name: str, profile: EngineProfile) -> FakeReranker:
    """Return a reranker with scores of its own: it agrees with the embedder no more often than on real engines."""
    return FakeReranker(name, profile, own_score)


_MAKERS: dict[str, Callable[[str, EngineProfile], Any]] = {
    "embedder": FakeEmbedder,
    "reranker": _reranker,
    "web": FakeWebSearch,
}


def _answers(tokens: int, lengths: Mapping[str, int]) -> Callable[[Prompt, Sampling], str] | None:
    """Return a function that makes answers of given lengths, unless they follow a schema; None without lengths."""
    if not (tokens or lengths):
        return None

    def answer(prompt: Prompt, sampling: Sampling) -> str:
        """Return an answer of the length that the query's mark, or the engine, says."""
        length = tokens
        text = prompt.flat()
        if lengths and (match := _MARK.search(text)):
            length = lengths.get(match.group(), tokens)
        if sampling.json_schema or not length:
            return default_answer(prompt, sampling)
        return answer_words(text, length)

    return answer
