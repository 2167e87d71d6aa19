"""`teola doctor`: what is installed, what is missing, and what to do about it. No engine is started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teola_plugin.cli.checks import Check

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def add_doctor(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed here, what is missing, and what to do about it",
        description="Checks versions, engines, memory, disks and GPUs, and says where engines would compute; starts "
        "nothing. Exit status 1 on a problem.",
    )
    parser.add_argument("--quick", action="store_true", help="do not import the engines' packages (about 20 s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Exit status 1 if any check found a problem."""
    from rich.console import Console

    notes = Console(stderr=True, quiet=options.json)
    with nullcontext() if options.quick else notes.status("importing what the engines run on ..."):
        found = list(diagnose(imports=not options.quick))
    if options.json:
        json.dump({"status": worst(found), "checks": [asdict(check) for check in found]}, sys.stdout)
        sys.stdout.write("\n")
    else:
        _show(Console(), found)
    return 1 if worst(found) == "problem" else 0


def diagnose(*, imports: bool = True) -> Iterator[Check]:
    """Every check in turn. Without `imports`, packages are only looked up."""
    from teola_plugin.cli import checks, device_checks

    yield checks.python()
    yield from checks.versions()
    torch = None
    if imports:
        from teola_plugin.cli.imports import imported

        present = [package for package in checks.PACKAGES if checks.installed(package)]
        results = imported([package.module for package in present])
        torch = results["torch"].found if "torch" in results and not results["torch"].error else None
        for package in present:
            if error := results[package.module].error:
                yield checks.Check(f"import {package.module}", "problem", error, f"{package.how}, in a new environment")
    yield checks.postgres()
    yield checks.port()
    yield checks.cores()
    yield checks.memory()
    yield from checks.disks()
    yield from device_checks.gpu(torch)
    yield from device_checks.devices(torch)
    yield from checks.settings()


def worst(found: Sequence[Check]) -> str:
    states = {check.status for check in found}
    return next((state for state in ("problem", "warning") if state in states), "ok")


def _show(console: Any, found: Sequence[Check]) -> None:
    from rich.text import Text

    wide = max(len(check.name) for check in found)
    for check in found:
        line = Text.assemble((f"{check.status:8}", _STYLES[check.status]), f"{check.name:{wide}}  {check.found}")
        console.print(line, highlight=False, soft_wrap=True)
        if check.next:
            console.print(Text(f"{'':8}{'':{wide}}  next: {check.next}", "dim"), highlight=False, soft_wrap=True)
    many = {state: sum(check.status == state for check in found) for state in _STYLES}
    console.print(f"\nok: {many['ok']}, warnings: {many['warning']}, problems: {many['problem']}", highlight=False)
