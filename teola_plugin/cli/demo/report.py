"""The demo's printed report, in some 25 lines, and what it prints in addition with `--verbose`. Times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from teola_plugin.cli.demo.measure import Case
from teola_plugin.observe import timeline_text

_BAR = 40
"""Characters of the longer bar."""
_COLOURS = {"plain": "yellow", "accelerated": "green"}


class SpeedResult(Protocol):
    """Median times in seconds, and whether every run gave the same answer."""

    @property
    def plain_s(self) -> float: ...
    @property
    def accelerated_s(self) -> float: ...
    @property
    def answers_equal(self) -> bool: ...


class Report:
    """A printer of results on stdout, each as soon as it is there; `quiet` prints nothing."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet)

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; parts may come with a style."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def question(self, text: str) -> None:
        self.line()
        self.line(("Question     ", "dim"), text)

    def first_answer(self, answer: Any, seconds: float) -> None:
        """Print the first answer of the original, which runs with cold caches."""
        self.line(("Answer       ", "dim"), f"{answer}", (f"  ({seconds:.1f} s, plain, the first run)", "dim"))

    def result(self, title: str, result: SpeedResult, runs: int) -> None:
        """Print two bars, and whether the answers are the same."""
        self.line()
        self.line((title, "bold"))
        longest = max(result.plain_s, result.accelerated_s)
        for name, seconds in (("plain", result.plain_s), ("accelerated", result.accelerated_s)):
            bar = "█" * max(1, round(_BAR * seconds / longest))
            self.line(f"  {name:11} ", (f"{bar:{_BAR}}", _COLOURS[name]), f" {seconds:.2f} s")
        equality = "same answer" if result.answers_equal else "DIFFERENT ANSWERS: this is a bug, please report it"
        self.line(
            "  ",
            (f"{ratio_text(result.plain_s, result.accelerated_s)}, {equality}", "bold"),
            f" (medians of {runs})" if runs > 1 else " (one run)",
        )

    def saved(self, parts: Mapping[str, float], rest: float) -> None:
        """Print the seconds that each overlap saved. `rest`: what everything else saved, or lost if it is negative."""
        for text, seconds in parts.items():
            self.line(f"  saved {seconds:5.2f} s: {text}")
        if parts and rest <= -0.005:
            self.line(f"  lost  {-rest:5.2f} s: the other parts took longer while more ran at once")

    def nothing_to_gain(self, result: SpeedResult) -> None:
        """Print the times of a chain without any overlap, for comparison."""
        times = f"{result.plain_s:.2f} s plain, {result.accelerated_s:.2f} s accelerated"
        self.line(f"  for comparison, retrieve-prompt-answer has nothing to overlap: {times}")

    def end(self, pages: Sequence[str]) -> None:
        """Print where the timelines are, and what to do next."""
        self.line()
        self.line("Timelines (open in a browser): ", " ".join(pages))
        self.line(
            "Plans, every figure: teola demo --verbose. Your own chain: teola compare my_app:chain --inputs q.jsonl"
        )


def ratio_text(plain_s: float, accelerated_s: float) -> str:
    """Return the ratio in words, e.g. `1.14x faster`.

    Both times are in seconds, and `accelerated_s` is above 0. Ratios from 0.98 to 1.02 count as equally fast.
    """
    ratio = plain_s / accelerated_s
    if 0.98 <= ratio <= 1.02:
        return f"as fast ({ratio:.2f}x)"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"


def print_details(console: Console, cases: dict[str, Case], facts: dict[str, Any], heading: str) -> None:
    """Print timelines, plans, the figures of every chain, and versions of the engines."""
    uploaded = cases["uploaded"]
    console.rule(heading, characters="=", style="bold")
    for label, run in (("Plain", uploaded.plain[-1]), ("Accelerated", uploaded.accelerated[-1])):
        console.rule(f"{label}: where the time went")
        console.print(timeline_text(run.trace, width=min(console.width, 110)), highlight=False, markup=False)
    console.rule("What was understood, and what it became")
    console.print(uploaded.explanation, highlight=False, markup=False, soft_wrap=True)
    console.rule("Figures")
    console.print(_case_table(cases))
    console.print(
        f"Bound of the first row from its data dependencies: {facts['bound_s']:.3f} s. "
        f"Prompt tokens prefilled early and found cached: {facts['cached_prefix_tokens']}."
    )
    for name, versions in facts["engines"].items():
        console.print(f"{name:9} " + ", ".join(f"{k} {v}" for k, v in versions.items()), highlight=False)


def _case_table(cases: dict[str, Case]) -> Table:
    """Return the table of all chains: times, ratio, equality of the answers, and the passes that fired."""
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
