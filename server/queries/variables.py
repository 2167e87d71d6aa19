"""Values that are not there yet: a submitted query may refer to the answers of others by name (Parrot's semantic
variables), and begins when they are done."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from teola_plugin.server.errors import bad_request

_NAME = re.compile(r"\{\{\s*([A-Za-z_]\w{0,63})\s*\}\}")


def references(variables: Mapping[str, Any]) -> dict[str, str]:
    """Name -> id of the query whose answer is its value. Raises `HttpError` for what is neither text nor that."""
    found: dict[str, str] = {}
    for name, value in variables.items():
        if isinstance(value, Mapping) and isinstance(value.get("query"), str) and len(value) == 1:
            found[name] = value["query"]
        elif not isinstance(value, str):
            hint = 'give a text, or {"query": "the id of another one"}'
            raise bad_request(f"the variable {name!r:.80} is neither.", hint, param="variables")
    return found


def check(body: Any, variables: Mapping[str, Any]) -> None:
    """Raises `HttpError` for a name in the input that nothing is said of."""
    missing = sorted(names_in(body) - variables.keys()) if variables else []
    if missing:
        raise bad_request(f"the input names {missing[0]!r}, which is no variable.", "add it", param="variables")


def names_in(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(_NAME.findall(value))
    if isinstance(value, Mapping):
        return set().union(*(names_in(one) for one in value.values()))
    return set().union(*(names_in(one) for one in value)) if isinstance(value, list) else set()


def filled(value: Any, known: Mapping[str, str]) -> Any:
    """With the values for `{{ name }}`; what they hold is text, whatever it looks like."""
    if isinstance(value, str):
        return _NAME.sub(lambda found: known.get(found[1], found[0]), value)
    if isinstance(value, Mapping):
        return {key: filled(one, known) for key, one in value.items()}
    return [filled(one, known) for one in value] if isinstance(value, list) else value
