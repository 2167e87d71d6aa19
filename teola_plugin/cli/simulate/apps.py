"""The user's apps, on a simulated pool: a function of theirs makes each from the pool."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.app_frameworks import entries_of
from teola_plugin.adapters.comparison import Entries
from teola_plugin.adapters.named_objects import object_named
from teola_plugin.cli.compare.options import check_inputs, read_inputs
from teola_plugin.errors import RegistrationError
from teola_plugin.simulation import Ask, mark
from teola_plugin.simulation.traces import made_up

if TYPE_CHECKING:
    from teola_plugin.pool import EnginePool

PLAIN, FAST = "plain", "accelerated"
WAYS = (PLAIN, FAST)
"""How an app is asked: as it is, and by `accelerate`."""
QUESTION_TOKENS = 24
"""Of a question that is made up."""
_HINT = "write a function that takes the pool and returns the app, made of ChatTeola(pool=pool) and the like"


@dataclass(frozen=True, slots=True)
class App:
    """One app: its name, and where the function is that makes it, as `module:function`."""

    name: str
    factory: str
    inputs: str = ""
    """A file with one JSON value a line; empty for questions that are made up."""

    @staticmethod
    def said(text: str, inputs: Mapping[str, str]) -> App:
        """Parse an app from `[NAME=]module:function`."""
        name, equals, factory = text.rpartition("=")
        name = name if equals else factory.partition(":")[2] or factory
        return App(name, factory, inputs.get(name, inputs.get("", "")))

    async def make(self, way: str, pool: EnginePool) -> Ask:
        """The app on this pool. Raises `RegistrationError`."""
        obj, arguments = await self._made(pool)
        entries = entries_of(obj, self.factory)
        if way == FAST:
            from teola_plugin import accelerate

            obj = accelerate(obj, **{"pool": pool, "app": self.name, **arguments})
        return partial(entries.acall, obj)

    async def _made(self, pool: EnginePool) -> tuple[Any, dict[str, Any]]:
        factory = object_named(self.factory)
        if not callable(factory) or not _takes_one(factory):
            raise RegistrationError(f"{self.factory} is no function of a pool.", hint=_HINT)
        try:
            found = factory(pool)
            if inspect.iscoroutine(found):
                found = await found
        except Exception as error:
            raise RegistrationError(
                f"{self.factory} raised {type(error).__qualname__}: {error}", hint=f"it is called with a pool: {_HINT}"
            ) from error
        obj, arguments = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if getattr(type(obj), "__teola_accelerated__", False):
            raise RegistrationError(f"{self.factory} gives an accelerated object.", hint="give the plain one: both run")
        return obj, dict(arguments)

    async def values(self, pool: EnginePool, queries: int, seed: int) -> list[Any]:
        """Return the inputs of its queries, from the file or generated. Raise RegistrationError for an invalid file."""
        obj, _ = await self._made(pool)
        entries = entries_of(obj, self.factory)
        if self.inputs:
            given = read_inputs(self.inputs)
            check_inputs(given, entries, self.inputs)
            return [one.value for one in given]
        sample = _sample(obj, entries, self.name)
        return [made_up(sample, mark(number), QUESTION_TOKENS, seed) for number in range(queries)]


def _takes_one(factory: Any) -> bool:
    try:
        inspect.signature(factory).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _sample(obj: Any, entries: Entries, name: str) -> Any:
    """An input with `{text}` where a question goes, as far as the object tells. Raises `RegistrationError`."""
    for sample in _tries(obj):
        if not entries.fault_in(sample):
            return sample
    raise RegistrationError(
        f"nobody knows what the app {name!r} is asked with.", hint="give --inputs FILE.jsonl, one JSON value a line"
    )


def _tries(obj: Any) -> Iterator[Any]:
    schema = getattr(obj, "get_input_jsonschema", None)
    if schema is None:
        yield "{text}"
        return
    found = schema()
    texts = [key for key, one in found.get("properties", {}).items() if one.get("type", "string") == "string"]
    if "messages" in found.get("properties", {}):
        yield {"messages": [{"role": "user", "content": "{text}"}]}
    elif found.get("type") == "string":
        yield "{text}"
    elif texts and not set(found.get("required", ())) - set(texts):
        yield dict.fromkeys(texts, "{text}")


def of_options(apps: Sequence[str], inputs: Sequence[str]) -> tuple[App, ...]:
    """Return the apps of the command line. Raise RegistrationError for invalid options."""
    files = dict(_file(text) for text in inputs)
    found = tuple(App.said(text, files) for text in apps)
    names = [app.name for app in found]
    if len(set(names)) < len(names):
        raise RegistrationError("two apps have one name.", hint="name them: --app first=module:function")
    for name in files:
        if name and name not in names:
            raise RegistrationError(
                f"--inputs names the app {name!r}, which is none.", hint=f"there is {', '.join(names)}"
            )
    return found


def _file(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    return (name, path) if equals else ("", text)
