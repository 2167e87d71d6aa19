"""`teola compare`: runs the user's own object, original and accelerated, on the user's own inputs."""

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
    from teola_plugin.cli.compare.measure import CompareSession, TimedRun
    from teola_plugin.cli.compare.options import InputLine
    from teola_plugin.pool import EnginePool

EQUAL, DIFFERENT, BAD_INPUT = 0, 1, 2
"""Exit statuses."""
REPEATS, PAIRS = 3, 12
"""The default number of repeats, and of pairs of runs: with few inputs there are more repeats."""
MAX_UNCONFIRMED_RUNS = 50
"""At a terminal the user is asked before more runs than these: the app's models may cost money."""


def add_compare(commands: Any) -> None:
    """Add the sub-command to an argparse group."""
    parser = commands.add_parser(
        "compare",
        help="your own chain on your own inputs, plain and accelerated",
        description="Runs an object plain (sync, async, and again as control) and accelerated, in turn. Every input is "
        "run seven times for each repeat, and twice before, so not for objects with side effects. Exit status: 1 if "
        "answers differ where the original agrees with itself, 2 for bad input.",
    )
    parser.add_argument(
        "object",
        metavar="module:object",
        help="a LangChain Runnable, a graph or agent, a LlamaIndex engine, retriever, synthesizer, workflow or agent; "
        "or langgraph.json:graph. A function may return it, alone or with a dictionary of accelerate's arguments",
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
        type=_parse_count,
        metavar="N",
        help=f"runs of each kind per input (default {REPEATS}, or as many as make {PAIRS} pairs)",
    )
    parser.add_argument("--limit", type=_parse_count, metavar="N", help="only the first N inputs")
    parser.add_argument("--speculate", choices=("auto", "all", "off"), help="see accelerate() (default auto)")
    parser.add_argument(
        "--read-only",
        action="append",
        default=[],
        metavar="TOOL",
        help="a tool of an agent that changes nothing, or mcp:SERVER for those that the server declares so "
        "(may be repeated)",
    )
    parser.add_argument(
        "--prompt-cache", action="store_true", help="let requests tell providers what to cache, see accelerate()"
    )
    parser.add_argument("--yes", action="store_true", help=f"do not ask before more than {MAX_UNCONFIRMED_RUNS} runs")
    for direction, tokens in (("in", "prompts"), ("out", "answers")):
        parser.add_argument(
            f"--price-{direction}",
            type=_parse_price,
            metavar="DOLLARS",
            help=f"the price of a million tokens of {tokens}; with both prices the report has dollars, too",
        )
    parser.add_argument("--no-stream", action="store_true", help="leave out the time to first token")
    parser.add_argument("--plot", metavar="FILE", help="write the latencies as a picture (.html or .svg)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.set_defaults(run=run_compare)


def _parse_count(text: str) -> int:
    """Parse an option that is a whole number of 1 or more. Raise `ArgumentTypeError` for another text."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return number


def _parse_price(text: str) -> float:
    """Parse a price in dollars per million tokens. Raise `ArgumentTypeError` for another text."""
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0.0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no price: give dollars per million tokens, e.g. 0.15")
    return price


def run_compare(options: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 0, 1 or 2, see above."""
    try:
        with stdout_to_stderr(options.json):
            runs, summary = _compare(options)
    except TeolaError as error:
        sys.stderr.write(f"teola: {error}\n")
        return BAD_INPUT
    if options.json:
        json.dump(summary, sys.stdout)
        sys.stdout.write("\n")
    else:
        from rich.console import Console

        from teola_plugin.cli.compare.report import print_report

        print_report(Console(), summary, runs)
    return DIFFERENT if summary["equality"]["state"] == "different" else EQUAL


def _compare(options: argparse.Namespace) -> tuple[list[TimedRun], dict[str, Any]]:
    """Run the object, and return the runs and their summary."""
    from teola_plugin import accelerate
    from teola_plugin.adapters.app_frameworks import entries_of
    from teola_plugin.adapters.named_objects import load
    from teola_plugin.cli.compare.figures import summarize_runs
    from teola_plugin.cli.compare.measure import STREAMS, CompareSession
    from teola_plugin.cli.compare.options import accelerate_arguments, check_inputs, read_inputs, suggest_bindings
    from teola_plugin.observe import Price

    _check_options(options)
    inputs = read_inputs(options.inputs, options.limit)
    target = load(options.object)
    entries = entries_of(target.plain, options.object)
    check_inputs(inputs, entries, options.inputs)
    arguments = accelerate_arguments(
        target,
        options.pool,
        options.bind,
        options.speculate,
        options.engines,
        options.read_only,
        prompt_cache=options.prompt_cache,
    )
    fast = accelerate(target.plain, **arguments) if target.fast is None else target.fast
    pool: EnginePool | None = fast.__teola_of__()[1]
    repeats = options.repeats or max(REPEATS, -(-PAIRS // len(inputs)))
    price = None if options.price_in is None else Price(options.price_in, options.price_out)
    with CompareSession(target.plain, fast, pool, entries, price) as session:
        variants = [name for name in session.variants if name not in STREAMS or not options.no_stream]
        count = (len(inputs) * repeats + 1) * len(variants) + 2 * len(inputs)
        _announce_runs(count, len(inputs), repeats, is_confirmed=options.yes)
        runs = _run_all(session, inputs, repeats, variants, count)
        summary = summarize_runs(fast, inputs, runs)
    if options.plot:
        _write_plot(options, runs)
    settings = {"object": options.object, "kind": entries.kind, "entries": entries.names, "repeats": repeats}
    has_engines = target.fast is not None or arguments.keys() & {"pool", "bind", "engines"}
    return runs, {**settings, **summary, "bindings": [] if has_engines else suggest_bindings(target.plain)}


def _check_options(options: argparse.Namespace) -> None:
    """Check what needs no import of the app. Raise `RegistrationError`."""
    from teola_plugin.adapters import DISABLE

    if os.environ.get(DISABLE, "") not in ("", "0"):
        raise RegistrationError(f"{DISABLE} is set: there would be nothing to compare.", hint=f"unset {DISABLE}")
    if (options.price_in is None) != (options.price_out is None):
        raise RegistrationError("only one of the two prices is given.", hint="give both --price-in and --price-out")
    if options.plot and not options.plot.endswith((".html", ".svg")):
        raise RegistrationError(f"cannot write a picture to {options.plot}.", hint="end its name in .html or .svg")


def _announce_runs(count: int, inputs: int, repeats: int, *, is_confirmed: bool) -> None:
    """Print how often the app will run; if that is often, ask at a terminal. Raise `RegistrationError` for a no."""
    inputs_text = "1 input" if inputs == 1 else f"{inputs} inputs"
    sys.stderr.write(
        f"teola: the app runs {count} times ({inputs_text}, {repeats} repeats of each way, and once or twice before), "
        "and each run calls its models. --repeats, --limit and --no-stream make it fewer.\n"
    )
    if count <= MAX_UNCONFIRMED_RUNS or is_confirmed or not sys.stdin.isatty():
        return
    sys.stderr.write("Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RegistrationError("nothing was run.", hint="--yes does not ask; --repeats 3 makes fewer runs")


def _run_all(
    session: CompareSession, inputs: Sequence[InputLine], repeats: int, variants: Sequence[str], count: int
) -> list[TimedRun]:
    """Warm up, then make all runs. `count` is the number of all these runs, for the progress bar."""
    from teola_plugin.cli.compare.measure import run_schedule, warm_up
    from teola_plugin.observe import progress

    with progress(count, "plain and accelerated, in turn") as bar:
        warm_up(session, inputs, variants, bar.advance)
        runs = []
        for variant, index, round_ in run_schedule(len(inputs), repeats, variants):
            runs.append(session.run(variant, index, inputs[index].value, round_))
            bar.advance()
    return runs


def _write_plot(options: argparse.Namespace, runs: Sequence[TimedRun]) -> None:
    """Write the picture that `--plot` names. Raise `RegistrationError` if the file cannot be written."""
    from teola_plugin.cli.compare.report import write_plot

    try:
        write_plot(options.plot, runs, f"{options.object}: share of calls that had ended")
    except OSError as error:
        raise RegistrationError(f"cannot write {options.plot}: {error.strerror}.", hint="check --plot") from error


@contextlib.contextmanager
def stdout_to_stderr(is_enabled: bool) -> Iterator[None]:
    """Send to stderr what the user's code, engines and their processes write to stdout, which is for our JSON alone."""
    if not is_enabled:
        yield
        return
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)
