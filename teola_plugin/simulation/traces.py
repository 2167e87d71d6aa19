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
_FIELDS = ("at", "app", "input", "input_tokens", "output_tokens")
_HINT = "docs/simulation.md says what a line holds"


def read_trace(
    path: str | Path, apps: Sequence[str], samples: Mapping[str, Any], limit: int | None = None
) -> list[Arrival]:
    """Return the first `limit` arrivals by time. `samples` has an input of each app, for lines with lengths only.

    Raises `ConfigError`, which names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", hint="check the path after --arrivals") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from error
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    arrivals = [_arrival(source, line, number, apps, samples) for number, (source, line) in enumerate(numbered)]
    if not arrivals:
        raise ConfigError(f"{path} holds no arrivals.", hint='one JSON object a line, e.g. {"at": 0.5, "input": "..."}')
    return sorted(arrivals, key=lambda arrival: arrival.at)[:limit]


def _arrival(source: str, line: str, number: int, apps: Sequence[str], samples: Mapping[str, Any]) -> Arrival:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}, column {error.colno}: no JSON value: {error.msg}.", hint=_HINT) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: it is no JSON object.", hint=_HINT)
    if unknown := [key for key in data if key not in _FIELDS]:
        raise ConfigError(f"{source}: there is no field {unknown[0]!r}.", hint=f"there are {', '.join(_FIELDS)}")
    at = _number(source, data, "at", None)
    app: Any = data.get("app", apps[0] if len(apps) == 1 else None)
    if app not in apps:
        raise ConfigError(f"{source}: there is no app {app!r}.", hint=f"there is {', '.join(apps)}")
    output = int(_number(source, data, "output_tokens", 0))
    if "input" in data and not output:
        return Arrival(at, app, data["input"])
    sample = data.get("input", samples.get(app))
    if "input" not in data and "input_tokens" not in data:
        raise ConfigError(f"{source}: it has neither input nor input_tokens.", hint=_HINT)
    word = mark(number)
    text = None if "input" in data else _text(word, int(_number(source, data, "input_tokens", 0)))
    try:
        return Arrival(at, app, filled(sample, text, word), output, word)
    except ValueError as error:
        raise ConfigError(
            f"{source}: {error}.", hint=f"give a sample by --inputs, with {TEXT} where the text goes"
        ) from None


def made_up(sample: Any, word: str, tokens: int, seed: int = 0) -> Any:
    """Return the sample with a text of so many tokens that `word` identifies. Raises `ValueError`."""
    return filled(sample, _text(word, tokens, seed), word)


def _text(word: str, tokens: int, seed: int = 0) -> str:
    return f"{word} {answer_words(f'{word} {seed}', max(1, tokens - 2))}"


def _number(source: str, data: Mapping[str, Any], key: str, default: float | None) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{source}: {key} is {value!r}.", hint=f"{key} must be a number of 0 or more")
    return value


def filled(sample: Any, text: str | None, word: str) -> Any:
    """Return the sample with the text in it; without a text, with the word in front of its own. Raises `ValueError`."""
    positions = _text_positions(sample)
    marked = [position for position in positions if TEXT in position[1]]
    targets = marked if text is not None and marked else positions
    if not targets or (not marked and len(targets) > 1):
        raise ValueError("nothing says where the text of the input goes")
    result = sample
    for path, old_text in targets:
        if text is None:
            new_text = f"{word} {old_text}"
        else:
            new_text = old_text.replace(TEXT, text) if TEXT in old_text else text
        result = _replace_text(result, path, new_text)
    return result


def _text_positions(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], str]]:
    """Return the paths and texts of all texts in a JSON value."""
    if isinstance(value, str):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [position for key, inner in value.items() for position in _text_positions(inner, (*path, key))]
    if isinstance(value, list):
        return [position for key, inner in enumerate(value) for position in _text_positions(inner, (*path, key))]
    return []


def _replace_text(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """Return the value with another text at the path."""
    if not path:
        return text
    inner = _replace_text(value[path[0]], path[1:], text)
    if isinstance(value, Mapping):
        return {**value, path[0]: inner}
    return [inner if number == path[0] else item for number, item in enumerate(value)]
