"""Builds engines from their settings where they run. Each kind imports its libraries only when it is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.names import engine_spec
from teola_plugin.engines.base import Engine
from teola_plugin.engines.devices.budget import share_of
from teola_plugin.errors import ConfigError
from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind

BUNDLED = "bundled"
"""Stands for a model (vllm, reranking): the small one that comes with the package."""


def build_engine(spec: Mapping[str, Any], number: int) -> Engine:
    """Return the engine for `spec`: the fields of an `EngineConfig`, and its `name`. `number` counts the replicas from
    0."""
    kind = spec.get("kind")
    make = _MAKERS[kind] if kind else _by_factory
    return make(str(spec["name"]), spec, _cores(spec, number))


def engines_here(config: str | Path | PoolConfig) -> tuple[dict[str, list[Engine]], dict[str, str], dict[str, int]]:
    """Build the replicas of a pool's file in this process; return them, the batch policies and the queue limits, by
    engine.

    Raises `ConfigError`, and what engines raise when they are made.
    """
    pool_config = config if isinstance(config, PoolConfig) else PoolConfig.read(config)
    engines = {
        name: [build_engine(engine_spec(name, engine_config), number) for number in range(engine_config.replicas)]
        for name, engine_config in pool_config.engines.items()
    }
    policies = {name: engine_config.policy for name, engine_config in pool_config.engines.items()}
    return engines, policies, {name: engine_config.max_queued for name, engine_config in pool_config.engines.items()}


def _cores(spec: Mapping[str, Any], number: int) -> str:
    cores = spec.get("cores") or ()
    return str(cores[number % len(cores)]) if cores else ""


def _memory(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return the memory option for a part of a GPU: the same share of its memory."""
    share = share_of(float(spec.get("gpus") or 0))
    return {} if share is None else {"gpu_memory_utilization": share}


def _on_card(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an engine that computes on the GPU that Ray gave to this process, the first that it sees.

    Without a reserved GPU it computes on the CPU, since Ray counts reservations. Options in `options` take precedence.
    """
    return {"device": "cuda" if spec.get("gpus") else "cpu", **_memory(spec), **spec["options"]}


def _vllm(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build a vLLM engine; the model `bundled` is the small one that comes with the package."""
    from teola_plugin.engines import model_cache as bundled
    from teola_plugin.engines.vllm import VllmEngine

    drafts = {} if spec.get("drafts") is None else {"drafts": spec["drafts"]}
    options = {"tell_cache": True, **drafts, **spec["options"]}  # one replica may become several
    engine_args = {**_memory(spec), **spec["engine_args"]}
    model = bundled.llm_folder() if spec["model"] == BUNDLED else spec["model"]
    return VllmEngine(name, model, engine_args=engine_args, cores=cores or None, **options)


def _embedding(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine

    return EmbeddingEngine(name, spec["model"] or None, cores=cores or None, **_on_card(spec))


def _reranking(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build a sentence-transformers reranker; `bundled` is the small model that comes with the package."""
    from teola_plugin.engines import model_cache as bundled
    from teola_plugin.engines.sentence_transformers import RerankingEngine

    model = bundled.reranker_folder() if spec["model"] == BUNDLED else spec["model"] or None
    return RerankingEngine(name, model, cores=cores or None, **_on_card(spec))


def _pgvector(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.pgvector import PgVectorEngine

    return PgVectorEngine(name, dsn=None if spec["dsn"] == "embedded" else spec["dsn"], **spec["options"])


def _openai(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.openai import OpenAIServer

    return OpenAIServer(name, base_url=spec["base_url"], model=spec["model"] or None, **spec["options"])


def _embedding_server(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build the engine of a server that embeds. `options`: those of `EmbeddingServer`."""
    from teola_plugin.engines.openai import EmbeddingServer

    return EmbeddingServer(name, base_url=spec["base_url"], model=spec["model"] or None, **spec["options"])


def _reranking_server(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build the engine of a server that reranks. `options`: those of `RerankingServer`."""
    from teola_plugin.engines.openai import RerankingServer

    return RerankingServer(name, base_url=spec["base_url"], model=spec["model"] or None, **spec["options"])


def _websearch(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build a web search. `options`: `service` (searxng, brave or tavily) and those of `WebSearchEngine`; the key is
    in the environment."""
    from teola_plugin.engines.websearch import WebSearchEngine

    return WebSearchEngine(name, base_url=spec["base_url"] or None, **spec["options"])


def _fulltext(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build a full-text search. `options`: `documents` (a JSONL file or a folder, on every node) and the others."""
    from teola_plugin.engines.fulltext import FullTextSearch

    return FullTextSearch(name, dsn=None if spec["dsn"] == "embedded" else spec["dsn"], **spec["options"])


def _tools(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build a tool engine. `options`: `tools` (a list of `package.module:function`), `read_only` (names) and the
    others."""
    from teola_plugin.engines.tools import ToolEngine

    options = dict(spec["options"])
    functions = [_imported(name, "tool", str(path)) for path in options.pop("tools")]
    return ToolEngine(name, functions, **options)


def _fake(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build a fake engine.

    `options`: `like` (llm, embedder, reranker or store; by default the engine's name), `machine` (a profile of
    `engines.profiles`), `seconds` (every batch takes so long, instead), `die_after` (batches; once).
    """
    from teola_plugin.engines import profiles
    from teola_plugin.engines.fake import Faults, fake_engines

    options = dict(spec["options"])
    like, machine = str(options.get("like", name)), getattr(profiles, str(options.get("machine", "noop")))()
    if like not in machine:
        raise ConfigError(f"there is no fake engine like {like!r}.", hint=f"options: {{like: {' | '.join(machine)}}}")
    if "seconds" in options:
        machine[like] = _constant(machine[like], float(options["seconds"]))
    faults = {like: Faults(die_after=options["die_after"])} if "die_after" in options else {}
    engine = next(candidate for candidate in fake_engines(machine, **faults) if candidate.name == like)
    engine.name = name
    return engine


def _constant(profile: EngineProfile, seconds: float) -> EngineProfile:
    return replace(profile, curves=dict.fromkeys(PrimitiveKind, Curve(((1, seconds), (2, seconds)))))


def _by_factory(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """Build an engine by the user's own `factory`, which is called with the engine's name and its `options`.

    Raise ConfigError if the factory cannot be imported on this node, and whatever the factory itself raises.
    """
    factory = _imported(name, "factory", str(spec["factory"]))
    engine: Engine = factory(name, **spec["options"])
    return engine


def _imported(engine: str, role: str, path: str) -> Any:
    """Return the object at `package.module:attribute`. Raise `ConfigError`, which names the engine and the object's
    role."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"engine {engine!r}: the {role} {path!r} cannot be imported: {error}.",
            hint="write package.module:callable, importable on every node",
        ) from error


_MAKERS: dict[str, Callable[[str, Mapping[str, Any], str], Engine]] = {
    "vllm": _vllm,
    "embedding": _embedding,
    "reranking": _reranking,
    "pgvector": _pgvector,
    "openai": _openai,
    "embedding_server": _embedding_server,
    "reranking_server": _reranking_server,
    "websearch": _websearch,
    "fulltext": _fulltext,
    "tools": _tools,
    "fake": _fake,
}
