"""`teola doctor`: what works on this machine, and the command that mends what does not. No engine is started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.cli.checks import Check
from teola_plugin.cli.features import Answer, answers, verdict

if TYPE_CHECKING:
    from rich.console import Console

    from teola_plugin.cli.imports import Imported

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_GROUPS = {"apps": "Apps that it makes faster", "engines": "Engines on this machine", "also": "Also"}
_COUNTED = {"ok": "ok", "warning": "warnings", "problem": "problems"}
_MACHINE = ("CPU", "memory", "GPU", "devices")
"""Checks that are told in any case."""


def add_doctor(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "doctor",
        help="what works on this machine, and how to get the rest",
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

    features: tuple[Answer, ...]
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> str:
        """The first line."""
        problems = [check for check in self.checks if check.status == "problem"]
        return verdict(self.features, problems, any(check.name == "TEOLA_DISABLE" for check in self.checks))


def run_doctor(options: argparse.Namespace) -> int:
    """Exit status 1 if any check found a problem."""
    from rich.console import Console

    notes = Console(stderr=True, quiet=options.json)
    with nullcontext() if options.quick else notes.status("importing what the engines run on ..."):
        found = diagnose(imports=not options.quick)
    status = worst(found.checks)
    if options.json:
        json.dump({"status": status, "verdict": found.verdict, **asdict(found)}, sys.stdout)
        sys.stdout.write("\n")
    else:
        _show(Console(), found, verbose=options.verbose)
    return 1 if status == "problem" else 0


def diagnose(*, imports: bool = True) -> Diagnosis:
    """Every check, and what works by them. Without `imports`, packages are only looked up."""
    from teola_plugin.cli import checks, device_checks

    found, torch, broken = [checks.python(), *checks.versions()], None, {}
    if imports:
        results = _imported()
        torch = results["torch"].found if "torch" in results and not results["torch"].error else None
        broken = {name: result.error for name, result in results.items() if result.error}
        for module, error in broken.items():
            how = f"{checks.of_module(module).how}, in a new environment"
            found.append(Check(f"import {module}", "problem", error, how))
    postgres = checks.postgres()
    found += [postgres, checks.port(), checks.cores(), checks.memory(), *checks.disks()]
    found += [*device_checks.gpu(torch), *device_checks.devices(torch), *checks.settings()]
    gpus = None if torch is None else torch.get("gpus", ())
    return Diagnosis(tuple(answers(broken, gpus, postgres)), tuple(found))


def _imported() -> dict[str, Imported]:
    from teola_plugin.cli import checks
    from teola_plugin.cli.imports import imported

    present = [package for package in (*checks.PACKAGES, *checks.OTHERS) if checks.installed(package)]
    return imported([package.module for package in present])


def worst(found: Sequence[Check]) -> str:
    states = {check.status for check in found}
    return next((state for state in ("problem", "warning") if state in states), "ok")


def _show(console: Console, found: Diagnosis, *, verbose: bool) -> None:
    """The verdict, what works, what does not and its remedy, then the checks that are not ok."""
    from rich.text import Text

    def line(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), highlight=False, soft_wrap=True)

    line((found.verdict, f"bold {_STYLES[worst(found.checks)].removeprefix('bold ')}"))
    for group, title in _GROUPS.items():
        line()
        line((title, "bold"))
        for answer in (one for one in found.features if one.group == group):
            mark = ("yes", "green") if answer.works else ("no ", "yellow")
            line("  ", mark, f"  {answer.name}: {answer.found}", *([f"; next: {answer.next}"] if answer.next else []))
    line()
    line(("This machine", "bold"))
    for check in found.checks:
        if verbose or (check.status != "ok" and not _told(check)) or check.name in _MACHINE:
            told = f"{check.name}: {check.found}" + (f"; next: {check.next}" if check.next else "")
            line("  ", (f"{check.status:8}", _STYLES[check.status]), told)
    many = {state: sum(check.status == state for check in found.checks) for state in _STYLES}
    line()
    line(
        f"ok: {many['ok']}, warnings: {many['warning']}, problems: {many['problem']}", "" if verbose else " (--verbose)"
    )


def _told(check: Check) -> bool:
    """Return True for a warning that the list of features covers already: a package that is not installed."""
    return check.status == "warning" and check.found.startswith(("not installed", "none is embedded"))
