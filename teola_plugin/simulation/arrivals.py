"""Arrivals of queries: when each comes, the app it is for, and its input; drawn from a seed, the same every time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teola_plugin.engines.fake import answer_words
from teola_plugin.errors import ConfigError
from teola_plugin.simulation.cluster import mark

BURSTINESS = 0.25
"""Shape of the gamma distribution of bursty gaps: their standard deviation is twice their mean."""
ZIPF = 1.1
"""Exponent of the popularity of inputs (Preble's ablation, arXiv 2407.00023)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One query: seconds after the start, the app, and the app's input."""

    at: float
    app: str
    value: Any
    output_tokens: int = 0
    """Length of each answer of its LLM calls; 0 for the engine's setting."""
    mark: str = ""
    """A word of the input by which an engine recognises its calls; empty if nothing depends on that."""


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Return the arrival times of a Poisson process of `rate` a second, without end. Raises `ValueError`."""
    return _times(_positive(rate), 1.0, random.Random(f"arrivals {seed}"))


def bursty(rate: float, seed: int = 0, burstiness: float = BURSTINESS) -> Iterator[float]:
    """Return arrival times of the same mean rate in bursts: gaps are gamma distributed with shape `burstiness`; 1 is
    Poisson.

    As in `vllm bench serve --burstiness`. Raises `ValueError`.
    """
    return _times(_positive(rate), _positive(burstiness), random.Random(f"arrivals {seed}"))


def _times(rate: float, shape: float, rng: random.Random) -> Iterator[float]:
    """Yield arrival times with gamma-distributed gaps, without end. `rate`: queries a second.

    `shape` is that of the gamma distribution: 1 is a Poisson process, less comes in bursts. Times are seconds from 0.
    """
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1.0 / (rate * shape))
        yield at


def _positive(number: float) -> float:
    """Return a rate of arrivals as it is. Raise ValueError unless it is a finite number above 0."""
    if not 0 < number < float("inf"):
        raise ValueError(f"{number!r} is no rate: give a number above 0")
    return number


def zipf(items: Sequence[Any], seed: int = 0, exponent: float = ZIPF) -> Callable[[], Any]:
    """Return a function that draws an item, the n-th in proportion to 1 / n ** exponent; with 0, all are alike.

    The same seed gives the same items. The default exponent is that of Preble's ablation (arXiv 2407.00023).
    """
    rng = random.Random(f"popularity {seed}")
    weights = [(number + 1) ** -exponent for number in range(len(items))]
    return lambda: rng.choices(items, weights)[0]


def arriving(
    times: Iterator[float],
    inputs: Mapping[str, Sequence[Any]],
    queries: int,
    *,
    shares: Mapping[str, float] | None = None,
    popularity: float | None = None,
    seed: int = 0,
) -> list[Arrival]:
    """Return so many queries. `inputs` are those of each app, `shares` how often each app is called (alike by default).

    Inputs are taken in turn, or, with `popularity`, drawn by Zipf's law with that exponent.
    """
    rng = random.Random(f"apps {seed}")
    names = list(inputs)
    weights = [(shares or {}).get(name, 1.0) for name in names]
    draw = {name: _drawing(name, items, popularity, seed) for name, items in inputs.items()}
    arrivals = []
    for _ in range(queries):
        name = names[0] if len(names) == 1 else rng.choices(names, weights)[0]
        arrivals.append(Arrival(next(times), name, draw[name]()))
    return arrivals


def _drawing(name: str, items: Sequence[Any], popularity: float | None, seed: int) -> Callable[[], Any]:
    """Return a function that gives an app's next input: in turn, or drawn by popularity. Raise ValueError for none."""
    if not items:
        raise ValueError(f"the app {name!r} has no inputs: give at least one")
    if popularity is not None:
        return zipf(items, seed, popularity)
    turn = iter(range(2**62))
    return lambda: items[next(turn) % len(items)]


# ------------------------------------------------------------ arrivals from a trace

TEXT = "{text}"
_FIELDS = ("at", "app", "input", "input_tokens", "output_tokens")
_HINT = "docs/reference-simulation.md says what a line holds"


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
    """Return the arrival that one line of a trace describes. Raise `ConfigError`, which names the line.

    `number`: that of the line, by which a generated text is recognised.
    """
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
    """Return a field that is a number of 0 or more. Raise `ConfigError` for another value."""
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{source}: {key} is {value!r}.", hint=f"{key} must be a number of 0 or more")
    return value


def filled(sample: Any, text: str | None, word: str) -> Any:
    """Return the sample with the text in place of each `{text}`, or, if it has no such mark, in place of its only text.

    If `text` is None, all its texts stay, with `word` in front of each, so that no two inputs are equal. Raise
    `ValueError` if the sample does not say where the text goes.
    """
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
