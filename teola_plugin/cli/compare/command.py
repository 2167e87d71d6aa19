"""`teola compare`: the user's own object, plain and accelerated, on the user's own inputs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import RegistrationError, TeolaError

if TYPE_CHECKING:
    from teola_plugin.cli.compare.given import Given
    from teola_plugin.cli.compare.measure import Run, Session
    from teola_plugin.pool import EnginePool

EQUAL, DIFFERENT, BAD_INPUT = 0, 1, 2
"""Exit statuses."""


def add_compare(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "compare",
        help="your own chain on your own inputs, plain and accelerated",
        description="Runs a Runnable plain (invoke, ainvoke, and again as control) and accelerated, in turn. Every "
        "input is run seven times for each repeat, so not for chains with side effects. Exit status: 1 if answers "
        "differ where the plain object agrees with itself, 2 for bad input.",
    )
    parser.add_argument("object", metavar="module:object", help="a Runnable, or a function that returns one")
    parser.add_argument("--inputs", required=True, metavar="FILE.jsonl", help="one JSON value a line")
    parser.add_argument(
        "--repeats", type=_count, default=3, metavar="N", help="runs of each kind per input (default 3)"
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N inputs")
    parser.add_argument("--speculate", choices=("auto", "all", "off"), default="auto", help="see accelerate()")
    parser.add_argument("--no-stream", action="store_true", help="leave out the time to first token")
    parser.add_argument("--plot", metavar="FILE", help="write the latencies as a picture (.html or .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run_compare)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def run_compare(options: argparse.Namespace) -> int:
    """Exit status 0, 1 or 2, see above."""
    try:
        with _stdout_kept(options.json):
            runs, found = _compared(options)
    except TeolaError as error:
        sys.stderr.write(f"teola: {error}\n")
        return BAD_INPUT
    if options.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
    else:
        from rich.console import Console

        from teola_plugin.cli.compare.show import show

        show(Console(), found, runs)
    return DIFFERENT if found["equality"]["state"] == "different" else EQUAL


def _compared(options: argparse.Namespace) -> tuple[list[Run], dict[str, Any]]:
    from teola_plugin import accelerate
    from teola_plugin.adapters import DISABLE
    from teola_plugin.cli.compare import given, plot
    from teola_plugin.cli.compare.figures import facts
    from teola_plugin.cli.compare.measure import Session

    if os.environ.get(DISABLE, "") not in ("", "0"):
        raise RegistrationError(f"{DISABLE} is set: there would be nothing to compare.", hint=f"unset {DISABLE}")
    if options.plot and not options.plot.endswith((".html", ".svg")):
        raise RegistrationError(f"cannot write a picture to {options.plot}.", hint="end its name in .html or .svg")
    inputs = given.read(options.inputs, options.limit)
    plain = given.load(options.object)
    fast = accelerate(plain, speculate=options.speculate, app="compare")
    with Session(plain, fast, _pool_of(plain)) as session:
        runs = _all_runs(session, inputs, options)
        found = facts(fast, inputs, runs)
    if options.plot:
        _write(plot.write, options, runs)
    settings = {"object": options.object, "repeats": options.repeats, "speculate": options.speculate}
    return runs, {**settings, **found}


def _pool_of(plain: Any) -> EnginePool | None:
    """The pool whose caches every run begins without."""
    if any(cls.__module__.startswith("langgraph.") for cls in type(plain).__mro__):
        from teola_plugin.adapters.langgraph.pools import the_pool_of_graph

        return the_pool_of_graph(plain)
    from teola_plugin.adapters.langchain.pools import the_pool_of

    return the_pool_of(plain)


def _all_runs(session: Session, inputs: Sequence[Given], options: argparse.Namespace) -> list[Run]:
    from teola_plugin.cli.compare.measure import order, ways
    from teola_plugin.observe import progress

    chosen = ways(streams=not options.no_stream)
    with progress((len(inputs) * options.repeats + 1) * len(chosen), "plain and accelerated, in turn") as bar:
        first = _first_that_works(session, inputs)
        for way in chosen:  # what is loaded, compiled or connected on first use
            session.run(way, first, inputs[first].value)
            bar.advance()
        runs = []
        for way, index in order(inputs, options.repeats, chosen):
            runs.append(session.run(way, index, inputs[index].value))
            bar.advance()
    return runs


def _first_that_works(session: Session, inputs: Sequence[Given]) -> int:
    """Index of the first input that the plain object takes. Raises `RegistrationError` where it takes none."""
    from teola_plugin.cli.compare.measure import ASYNC, SYNC

    errors = []
    for index, given in enumerate(inputs):
        for way in (SYNC, ASYNC):
            run = session.run(way, index, given.value)
            if not run.raised:
                return index
            errors.append(run.raised)
    raise RegistrationError(
        f"the plain object raised on every input; on line {inputs[0].line}: {errors[0]}.",
        hint="inputs must be what its invoke takes, one JSON value a line",
    )


def _write(write: Any, options: argparse.Namespace, runs: Sequence[Run]) -> None:
    try:
        write(options.plot, runs, f"{options.object}: share of calls that had ended")
    except OSError as error:
        raise RegistrationError(f"cannot write {options.plot}: {error.strerror}.", hint="check --plot") from error


@contextlib.contextmanager
def _stdout_kept(wanted: bool) -> Iterator[None]:
    """What the user's code, engines and their processes write to stdout goes to stderr: only our JSON is there."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
