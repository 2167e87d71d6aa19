"""The `teola` command."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

from teola_plugin import __version__
from teola_plugin.errors import RegistrationError, TeolaError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses: what was asked for could not be done; it cannot be done, as argparse says it, too; Ctrl-C."""
NO_READER = 141
"""Exit status where nobody reads the output any more, as of a program that SIGPIPE ended: `teola status | head -1`."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. Sub-commands are of this class, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"teola: {message}. Next: {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status. Errors of this package go to stderr as one line and a hint."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # as rich ends a program whose output nobody reads
            return NO_READER
        raise
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the interpreter flushes at its end goes nowhere
        return NO_READER


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _Parser(prog="teola", description="Make a LangChain or LlamaIndex app answer faster.")
    made.add_argument("--version", action="version", version=f"teola-plugin {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from teola_plugin.cli.compare.command import add_compare
    from teola_plugin.cli.demo.command import add_demo
    from teola_plugin.cli.doctor import add_doctor
    from teola_plugin.cli.pool.commands import add_pool
    from teola_plugin.cli.serve.command import add_serve
    from teola_plugin.cli.simulate.command import add_simulate

    for add in (add_demo, add_compare, add_simulate, add_doctor, add_pool, add_serve):
        add(commands)
    return made


def _run(arguments: Sequence[str] | None) -> int:
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TeolaError as error:
        print(f"teola: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT if isinstance(error, RegistrationError) else FAILED
    except KeyboardInterrupt:
        print("teola: interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _nobody_reads() -> bool:
    """Return True if our stdout is closed, and not the connection of an engine."""
    if not hasattr(select, "poll"):
        return True
    watched = select.poll()
    watched.register(1, 0)  # errors are always told
    return any(happened & select.POLLERR for _, happened in watched.poll(0))


if __name__ == "__main__":
    sys.exit(main())
