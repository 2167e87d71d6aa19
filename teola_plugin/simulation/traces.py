"""Arrivals from a file: one JSON object a line, in any order.

==================  =================================================================================================
``at``              seconds after the start; required
``app``             the app's name; needed where several apps are simulated
``input``           what the app is asked with, any JSON value
``input_tokens``    instead of ``input``: a text of so many tokens is made up, and put where the app's sample input has
                    ``{text}``; a sample that is a text, or has one text field, needs no ``{text}``
``output_tokens``   tokens of each answer of the query's LLM calls (``max_tokens`` of a call cuts longer ones)
==================  =================================================================================================

Lengths are what public traces hold (Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from teola_plugin.engines.fake import answer_words
from teola_plugin.errors import ConfigError
from teola_plugin.simulation.arrivals import Arrival
from teola_plugin.simulation.cluster import mark

TEXT = "{text}"
_KNOWN = ("at", "app", "input", "input_tokens", "output_tokens")
_HINT = "docs/simulation.md says what a line holds"


def read_trace(
    path: str | Path, apps: Sequence[str], samples: Mapping[str, Any], limit: int | None = None
) -> list[Arrival]:
    """The first `limit` arrivals by time. `samples`: an input of each app, for lines that give only lengths.

    Raises `ConfigError`, which names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", hint="check the path after --arrivals") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from error
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    found = [_arrival(where, line, number, apps, samples) for number, (where, line) in enumerate(numbered)]
    if not found:
        raise ConfigError(f"{path} holds no arrivals.", hint='one JSON object a line, e.g. {"at": 0.5, "input": "..."}')
    return sorted(found, key=lambda one: one.at)[:limit]


def _arrival(where: str, line: str, number: int, apps: Sequence[str], samples: Mapping[str, Any]) -> Arrival:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, column {error.colno}: no JSON value: {error.msg}.", hint=_HINT) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: it is no JSON object.", hint=_HINT)
    if unknown := [key for key in data if key not in _KNOWN]:
        raise ConfigError(f"{where}: there is no field {unknown[0]!r}.", hint=f"there are {', '.join(_KNOWN)}")
    at = _number(where, data, "at", None)
    app: Any = data.get("app", apps[0] if len(apps) == 1 else None)
    if app not in apps:
        raise ConfigError(f"{where}: there is no app {app!r}.", hint=f"there is {', '.join(apps)}")
    output = int(_number(where, data, "output_tokens", 0))
    if "input" in data and not output:
        return Arrival(at, app, data["input"])
    given = data.get("input", samples.get(app))
    if "input" not in data and "input_tokens" not in data:
        raise ConfigError(f"{where}: it has neither input nor input_tokens.", hint=_HINT)
    word = mark(number)
    text = None if "input" in data else _text(word, int(_number(where, data, "input_tokens", 0)))
    try:
        return Arrival(at, app, filled(given, text, word), output, word)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {error}.", hint=f"give a sample by --inputs, with {TEXT} where the text goes"
        ) from None


def made_up(sample: Any, word: str, tokens: int, seed: int = 0) -> Any:
    """The sample, asked with a text of so many tokens that is known by `word`. Raises `ValueError`."""
    return filled(sample, _text(word, tokens, seed), word)


def _text(word: str, tokens: int, seed: int = 0) -> str:
    return f"{word} {answer_words(f'{word} {seed}', max(1, tokens - 2))}"


def _number(where: str, data: Mapping[str, Any], key: str, default: float | None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: {key} is {value!r}.", hint=f"{key} must be a number of 0 or more")
    return value


def filled(sample: Any, text: str | None, word: str) -> Any:
    """The sample with the text in it; without a text, with the word in front of its own. Raises `ValueError`."""
    places = _places(sample)
    named = [place for place in places if TEXT in place[1]]
    chosen = named if text is not None and named else places
    if not chosen or (not named and len(chosen) > 1):
        raise ValueError("nothing says where the text of the input goes")
    made = sample
    for path, before in chosen:
        if text is None:
            after = f"{word} {before}"
        else:
            after = before.replace(TEXT, text) if TEXT in before else text
        made = _with(made, path, after)
    return made


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    """Where texts are in a JSON value."""
    if isinstance(value, str):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [found for key, inner in value.items() for found in _places(inner, (*path, key))]
    if isinstance(value, list):
        return [found for key, inner in enumerate(value) for found in _places(inner, (*path, key))]
    return []


def _with(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """The same with another text there."""
    if not path:
        return text
    inner = _with(value[path[0]], path[1:], text)
    if isinstance(value, Mapping):
        return {**value, path[0]: inner}
    return [inner if number == path[0] else one for number, one in enumerate(value)]
