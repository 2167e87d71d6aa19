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
REPEATS, PAIRS = 3, 12
"""Of few inputs more runs are made, so that there are as many pairs."""
MOST_UNASKED = 50
"""Runs of an app that are made without asking a user who sits at a terminal: its models may cost money."""


def add_compare(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "compare",
        help="your own chain on your own inputs, plain and accelerated",
        description="Runs an object plain (sync, async, and again as control) and accelerated, in turn. Every input is "
        "run seven times for each repeat, and twice before, so not for objects with side effects. Exit status: 1 if "
        "answers differ where the plain object agrees with itself, 2 for bad input.",
    )
    parser.add_argument(
        "object",
        metavar="module:object",
        help="a LangChain Runnable, a graph or agent, a LlamaIndex engine, retriever, synthesizer, workflow or agent, "
        "or a function that returns one, alone or with a dictionary of accelerate's arguments",
    )
    parser.add_argument("--inputs", required=True, metavar="FILE.jsonl", help="one JSON value a line")
    parser.add_argument("--pool", default="", metavar="NAME", help="an EnginePool as module:object, or its YAML file")
    parser.add_argument(
        "--bind",
        action="append",
        default=[],
        metavar="module:object=ENGINE",
        help="the pool's engine that serves a model of yours (may be repeated)",
    )
    parser.add_argument(
        "--engines", choices=("auto", "dedicated"), help="make engines for your own models, see accelerate()"
    )
    parser.add_argument(
        "--repeats",
        type=_count,
        metavar="N",
        help=f"runs of each kind per input (default {REPEATS}, or as many as make {PAIRS} pairs)",
    )
    parser.add_argument("--limit", type=_count, metavar="N", help="only the first N inputs")
    parser.add_argument("--speculate", choices=("auto", "all", "off"), help="see accelerate() (default auto)")
    parser.add_argument("--yes", action="store_true", help=f"do not ask before more than {MOST_UNASKED} runs")
    parser.add_argument("--no-stream", action="store_true", help="leave out the time to first token")
    parser.add_argument("--plot", metavar="FILE", help="write the latencies as a picture (.html or .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run_compare)


def _count(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
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
    from teola_plugin.adapters.app_frameworks import entries_of
    from teola_plugin.adapters.named_objects import load
    from teola_plugin.cli.compare import given, plot
    from teola_plugin.cli.compare.engines import arguments_of
    from teola_plugin.cli.compare.figures import facts
    from teola_plugin.cli.compare.measure import Session
    from teola_plugin.cli.compare.suggested import bindings_that_help

    _check(options)
    inputs = given.read(options.inputs, options.limit)
    target = load(options.object)
    entries = entries_of(target.plain, options.object)
    given.check(inputs, entries, options.inputs)
    arguments = arguments_of(target, options.pool, options.bind, options.speculate, options.engines)
    fast = accelerate(target.plain, **arguments) if target.fast is None else target.fast
    repeats = options.repeats or max(REPEATS, -(-PAIRS // len(inputs)))
    with Session(target.plain, fast, _pool_of(fast), entries) as session:
        entries_run = _entries_to_run(session, streams=not options.no_stream)
        count = (len(inputs) * repeats + 1) * len(entries_run) + len(inputs)
        _announce(count, len(inputs), repeats, is_confirmed=options.yes)
        runs = _all_runs(session, inputs, repeats, entries_run, count)
        found = facts(fast, inputs, runs)
    if options.plot:
        _write(plot.write, options, runs)
    settings = {"object": options.object, "kind": entries.kind, "entries": entries.names, "repeats": repeats}
    served = target.fast is not None or arguments.keys() & {"pool", "bind", "engines"}
    return runs, {**settings, **found, "bindings": [] if served else bindings_that_help(target.plain)}


def _check(options: argparse.Namespace) -> None:
    """What can be said before anything is imported. Raises `RegistrationError`."""
    from teola_plugin.adapters import DISABLE

    if os.environ.get(DISABLE, "") not in ("", "0"):
        raise RegistrationError(f"{DISABLE} is set: there would be nothing to compare.", hint=f"unset {DISABLE}")
    if options.plot and not options.plot.endswith((".html", ".svg")):
        raise RegistrationError(f"cannot write a picture to {options.plot}.", hint="end its name in .html or .svg")


def _pool_of(fast: Any) -> EnginePool | None:
    """The pool whose caches every run begins without."""
    pool: EnginePool | None = fast.__teola_of__()[1]
    return pool


def _entries_to_run(session: Session, *, streams: bool) -> list[str]:
    from teola_plugin.cli.compare.measure import FAST_STREAM, STREAM

    return [name for name in session.ways if streams or name not in (STREAM, FAST_STREAM)]


def _announce(count: int, inputs: int, repeats: int, *, is_confirmed: bool) -> None:
    """Say how often the app will run; where that is often, ask at a terminal. Raises `RegistrationError` for a no."""
    inputs_text = "1 input" if inputs == 1 else f"{inputs} inputs"
    sys.stderr.write(
        f"teola: the app runs {count} times ({inputs_text}, {repeats} repeats of each way, and once or twice before), "
        "and each run calls its models. --repeats, --limit and --no-stream make it fewer.\n"
    )
    if count <= MOST_UNASKED or is_confirmed or not sys.stdin.isatty():
        return
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RegistrationError("nothing was run.", hint="--yes does not ask; --repeats 3 makes fewer runs")


def _all_runs(
    session: Session, inputs: Sequence[Given], repeats: int, entries_run: Sequence[str], count: int
) -> list[Run]:
    from teola_plugin.cli.compare.measure import order, warm_up
    from teola_plugin.observe import progress

    with progress(count, "plain and accelerated, in turn") as bar:
        warm_up(session, inputs, entries_run, bar.advance)
        runs = []
        for entry, index, round_ in order(len(inputs), repeats, entries_run):
            runs.append(session.run(entry, index, inputs[index].value, round_))
            bar.advance()
    return runs


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
