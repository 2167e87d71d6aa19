"""The `teola` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from teola_plugin import __version__
from teola_plugin.errors import TeolaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status. Errors of this package go to stderr as one line and a hint."""
    parser = argparse.ArgumentParser(prog="teola", description="Make a LangChain or LlamaIndex app answer sooner.")
    parser.add_argument("--version", action="version", version=f"teola-plugin {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    from teola_plugin.cli.compare.command import add_compare
    from teola_plugin.cli.demo.command import add_demo
    from teola_plugin.cli.doctor import add_doctor
    from teola_plugin.cli.pool.commands import add_pool

    for add in (add_demo, add_compare, add_doctor, add_pool):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except TeolaError as error:
        print(f"teola: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("teola: interrupted", file=sys.stderr)  # noqa: T201
        return 130


if __name__ == "__main__":
    sys.exit(main())
