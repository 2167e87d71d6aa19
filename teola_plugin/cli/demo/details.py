"""What the demo prints with `--verbose`: timelines, plans, figures of every chain, versions."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from teola_plugin.cli.demo.measure import Case
from teola_plugin.observe import timeline_text


def details(console: Console, cases: dict[str, Case], facts: dict[str, Any], heading: str) -> None:
    """Timelines, plans, passes, figures."""
    uploaded = cases["uploaded"]
    console.rule(heading, characters="=", style="bold")
    for label, run in (("Plain", uploaded.plain[-1]), ("Accelerated", uploaded.accelerated[-1])):
        console.rule(f"{label}: where the time went")
        console.print(timeline_text(run.trace, width=min(console.width, 110)), highlight=False, markup=False)
    console.rule("What was understood, and what it became")
    console.print(uploaded.explanation, highlight=False, markup=False, soft_wrap=True)
    console.rule("Figures")
    console.print(_table(cases))
    console.print(
        f"Bound of the first row from its data dependencies: {facts['bound_s']:.3f} s. "
        f"Prompt tokens prefilled early and found cached: {facts['cached_prefix_tokens']}."
    )
    for name, versions in facts["engines"].items():
        console.print(f"{name:9} " + ", ".join(f"{k} {v}" for k, v in versions.items()), highlight=False)


def _table(cases: dict[str, Case]) -> Table:
    table = Table("chain", "plain", "accelerated", "ratio", "answers", "passes that fired")
    for case in cases.values():
        table.add_row(
            case.name,
            f"{case.plain_s:.3f} s",
            f"{case.accelerated_s:.3f} s",
            f"{case.speedup:.2f}",
            "equal" if case.answers_equal else "DIFFERENT",
            ", ".join(case.passes_fired) or "none",
        )
    return table
