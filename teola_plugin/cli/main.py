"""The `teola` command."""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from teola_plugin import __version__
from teola_plugin.errors import MissingPackage, RegistrationError, TeolaError, missing_package

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses: the command failed; its input is invalid, as for argparse; Ctrl-C."""
NO_READER = 141
"""Exit status if nobody reads the output any more (`teola status | head -1`): that of a program ended by SIGPIPE."""

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "demo": ("demo",),
    "compare": ("langchain", "llamaindex"),
    "simulate": ("yaml",),
    "calibrate": ("yaml",),
    **dict.fromkeys(("up", "status", "scale", "down"), ("ray",)),
    **dict.fromkeys(("serve", "key"), ("server",)),
}
"""Command -> the extras that bring the packages it imports; each of them suffices. `doctor` needs none."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line. Parsers of sub-commands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"teola: {message}. Next: {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. Errors of this package go to stderr as one line with a hint."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends a program so if nobody reads its output
            return NO_READER
        raise
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards what the interpreter flushes when it ends
        return NO_READER


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    root = _Parser(prog="teola", description="Make a LangChain or LlamaIndex app answer faster.")
    root.add_argument("--version", action="version", version=f"teola-plugin {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from teola_plugin.cli.compare.command import add_compare
    from teola_plugin.cli.demo.command import add_demo
    from teola_plugin.cli.doctor import add_doctor
    from teola_plugin.cli.pool import add_pool
    from teola_plugin.cli.serve import add_serve
    from teola_plugin.cli.simulate.command import add_simulate

    for add in (add_demo, add_compare, add_simulate, add_doctor, add_pool, add_serve):
        add(commands)
    return root


def _run(arguments: Sequence[str] | None) -> int:
    """Parse the arguments and run the sub-command. Return its exit status; print errors of ours in one line."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ModuleNotFoundError as error:
        if error.name is None or not (isinstance(error, MissingPackage) or _is_import_of_ours(error)):
            raise
        missing = missing_package(f"teola {options.command}", error.name, *_EXTRAS[options.command])
        print(f"teola: {missing}", file=sys.stderr)  # noqa: T201
        return FAILED
    except TeolaError as error:
        print(f"teola: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT if isinstance(error, RegistrationError) else FAILED
    except KeyboardInterrupt:
        print("teola: interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _is_import_of_ours(error: ModuleNotFoundError) -> bool:
    """Return True if a module of this package tried the import that failed, rather than code of the user."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    importers = [name for name in modules if not name.startswith("importlib")]
    return bool(importers) and importers[-1].startswith("teola_plugin")


def _is_stdout_closed() -> bool:
    """Return True if the broken pipe is our stdout, and False if it is the connection of an engine."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(1, 0)  # errors are reported without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
