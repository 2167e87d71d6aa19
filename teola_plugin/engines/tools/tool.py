"""One tool, and how its own errors are told."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.errors import EngineError, RegistrationError


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, sync or async, under a name. `read_only`: its author declares that it changes nothing, so that it may
    be called early, and again where an engine has died."""

    name: str
    function: Callable[..., Any]
    read_only: bool = False

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function and return its value. Blocks; an async function runs on a loop of its own."""
        made = self.function(**arguments)
        return asyncio.run(_awaited(made)) if inspect.isawaitable(made) else made


async def _awaited(made: Any) -> Any:
    return await made


class ToolRaised(EngineError):
    """The function itself raised: the error is its `__cause__`, in the process where it ran."""


def to_tools(given: Iterable[Any], read_only: Iterable[Any]) -> dict[str, Tool]:
    """Return the tools by name.

    Raises:
        RegistrationError: A tool is not a function, two tools have one name, or `read_only` names an unknown tool.
    """
    harmless = [one.name if isinstance(one, Tool) else one for one in read_only]
    found: dict[str, Tool] = {}
    for one in given:
        tool = one if isinstance(one, Tool) else _of_function(one)
        if tool.name in found:
            raise RegistrationError(
                f"two tools are named {tool.name!r}.", hint="name one otherwise: teola_plugin.engines.tools.Tool"
            )
        declared = tool.read_only or tool.name in harmless or tool.function in harmless
        found[tool.name] = Tool(tool.name, tool.function, declared)
    functions = {tool.function for tool in found.values()}
    if unknown := [one for one in harmless if one not in found and one not in functions]:
        raise RegistrationError(
            f"read_only names {unknown[0]!r}, which is none of the tools.", hint=f"known: {', '.join(found) or 'none'}"
        )
    return found


def _of_function(given: Any) -> Tool:
    name = getattr(given, "__name__", "")
    if not callable(given) or not name.isidentifier():
        raise RegistrationError(
            f"{given!r} is no named function.", hint="give functions, or teola_plugin.engines.tools.Tool with a name"
        )
    return Tool(name, given)
