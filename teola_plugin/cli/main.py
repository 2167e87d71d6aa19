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
"""Exit statuses: the command failed; its input is invalid, as for argparse; Ctrl-C."""
NO_READER = 141
"""Exit status if nobody reads the output any more (`teola status | head -1`): that of a program ended by SIGPIPE."""


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
    except TeolaError as error:
        print(f"teola: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT if isinstance(error, RegistrationError) else FAILED
    except KeyboardInterrupt:
        print("teola: interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _is_stdout_closed() -> bool:
    """Return True if the broken pipe is our stdout, and False if it is the connection of an engine."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(1, 0)  # errors are reported without being asked for
    return any(event & select.POLLERR for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
