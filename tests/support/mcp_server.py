"""An MCP server over stdio, run as a program. It appends every call to the file named by its first argument."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from mcp.server.fastmcp import FastMCP
from mcp.types import ToolAnnotations

LOG = Path(sys.argv[1])
server = FastMCP("weather", log_level="ERROR")


def note(tool: str, **arguments: object) -> None:
    with LOG.open("a") as log:
        log.write(json.dumps({"pid": os.getpid(), "tool": tool, "arguments": arguments}) + "\n")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    note("weather", city=city, days=days)
    return f"sunny in {city} for {days}"


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def broken(city: str) -> str:
    """A tool that fails."""
    note("broken", city=city)
    raise ValueError(f"no weather in {city}")


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
async def slow(city: str) -> str:
    """A tool that takes longer than anybody waits."""
    note("slow", city=city)
    await asyncio.sleep(60)
    return city


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def dying(city: str) -> str:
    """A tool at which the server's process ends."""
    note("dying", city=city)
    os._exit(1)


@server.tool(annotations=ToolAnnotations(readOnlyHint=False))
def book(city: str) -> str:
    """Book a journey to a city."""
    note("book", city=city)
    return f"booked {city}"


@server.tool()
def unmarked(city: str) -> str:
    """A tool of which the server says nothing."""
    note("unmarked", city=city)
    return f"found {city}"


if __name__ == "__main__":
    server.run()
