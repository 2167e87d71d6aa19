"""An engine from its settings, made where it is to run. Imports are as late as possible: each kind has its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.errors import ConfigError


def build_engine(spec: Mapping[str, Any], number: int) -> Engine:
    """`spec`: the fields of an `EngineConfig`, and its `name`; `number` counts the instances from 0."""
    kind = spec.get("kind")
    make = _MAKERS[kind] if kind else _by_factory
    return make(str(spec["name"]), spec, _cores(spec, number))


def _cores(spec: Mapping[str, Any], number: int) -> str:
    cores = spec.get("cores") or ()
    return str(cores[number % len(cores)]) if cores else ""


def _vllm(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.llm_vllm import VllmEngine

    return VllmEngine(name, spec["model"], engine_args=spec["engine_args"], cores=cores or None, **spec["options"])


def _embedding(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.embedding import EmbeddingEngine

    return EmbeddingEngine(name, spec["model"] or None, cores=cores or None, **spec["options"])


def _reranking(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.reranking import RerankingEngine

    return RerankingEngine(name, spec["model"] or None, cores=cores or None, **spec["options"])


def _pgvector(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.vector_pgvector import PgVectorEngine

    return PgVectorEngine(name, dsn=None if spec["dsn"] == "embedded" else spec["dsn"], **spec["options"])


def _openai(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    from teola_plugin.engines.openai_api import OpenAIServer

    return OpenAIServer(name, base_url=spec["base_url"], model=spec["model"] or None, **spec["options"])


def _fake(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    """`options`: `machine` (a profile of `engines.profiles`) and `like` (llm, embedder, reranker or store)."""
    from teola_plugin.engines import profiles
    from teola_plugin.engines.fake import fake_engines

    options = dict(spec["options"])
    like, machine = options.get("like", name), options.get("machine", "noop")
    made = {engine.name: engine for engine in fake_engines(getattr(profiles, machine)())}
    if like not in made:
        raise ConfigError(f"there is no fake engine like {like!r}.", hint=f"options: {{like: {' | '.join(made)}}}")
    engine = made[like]
    engine.name = name
    return engine


def _by_factory(name: str, spec: Mapping[str, Any], cores: str) -> Engine:
    module, _, attribute = str(spec["factory"]).partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"engine {name!r}: the factory {spec['factory']!r} cannot be imported: {error}.",
            hint="write package.module:callable, importable on every node",
        ) from error
    made: Engine = factory(name, **spec["options"])
    return made


_MAKERS: dict[str, Callable[[str, Mapping[str, Any], str], Engine]] = {
    "vllm": _vllm,
    "embedding": _embedding,
    "reranking": _reranking,
    "pgvector": _pgvector,
    "openai": _openai,
    "fake": _fake,
}
