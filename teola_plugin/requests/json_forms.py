"""Forms of JSON answers that follow a schema: its keys and constants, with gaps for what the model writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from teola_plugin.graph import GAP

MAX_FORMS = 8
"""Maximum number of forms of one schema: each of several possible values makes a form of its own."""
_MAX_DEPTH = 6
_ITEMS = 4
"""Number of items in the form of a list without a fixed length."""
_MAX_LENGTH = 2000
"""Maximum length of a form, in characters; the rest is left out."""


@lru_cache(maxsize=256)
def forms_of_schema(schema: str) -> tuple[str, ...]:
    """Return the forms of answers for a schema in JSON; () if the schema fixes no text.

    Forms without spaces come first, as vLLM's grammars write them, then forms with spaces, as models write them.
    """
    try:
        described = json.loads(schema) if schema else None
    except ValueError:
        return ()
    return tuple(dict.fromkeys((*forms(described, spaces=False), *forms(described))))


def forms(described: Any, *, spaces: bool = True) -> tuple[str, ...]:
    """Return at most `MAX_FORMS` forms for a schema, in its order, with or without spaces after commas and colons."""
    if not isinstance(described, Mapping):
        return ()
    definitions = _mapping(described.get("$defs") or described.get("definitions"))
    bodies = _Forms(definitions, " " if spaces else "").of(described, 0)
    complete = (_with_gap(body) for body in bodies)
    return tuple(dict.fromkeys(form for form in complete if form.strip(GAP + '"')))


def _with_gap(form: str) -> str:
    """Return the form with a gap at its end if it has none, and without repeated gaps."""
    while GAP * 2 in form:
        form = form.replace(GAP * 2, GAP)
    form = form[:_MAX_LENGTH]
    return form if GAP in form else form + GAP


class _Forms:
    """A builder of forms. References are looked up in `definitions`; `space` follows commas and colons."""

    def __init__(self, definitions: Mapping[str, Any], space: str) -> None:
        self._definitions = definitions
        self._comma, self._colon = f",{space}", f":{space}"

    def _text(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(self._comma, self._colon))

    def of(self, described: Any, depth: int) -> list[str]:
        """Return the forms of a value; a gap alone if nothing is known about it."""
        if not isinstance(described, Mapping) or depth > _MAX_DEPTH:
            return [GAP]
        if "$ref" in described:
            return self.of(self._definitions.get(str(described["$ref"]).rpartition("/")[2]), depth + 1)
        if "const" in described:
            return [self._text(described["const"])]
        if values := _list(described.get("enum")):
            return [self._text(value) for value in values[:MAX_FORMS]]
        for several in ("anyOf", "oneOf", "allOf"):
            if parts := _list(described.get(several)):
                alternatives = (form for part in parts for form in self.of(part, depth + 1))
                return list(dict.fromkeys(itertools.islice(alternatives, MAX_FORMS)))
        return self._of_type(described, depth)

    def _of_type(self, described: Mapping[str, Any], depth: int) -> list[str]:
        """Return the forms of a value by its JSON type; a gap alone for a number, a boolean or an unknown type."""
        match described.get("type", "object" if "properties" in described else None):
            case "string":
                return [f'"{GAP}"']
            case "null":
                return ["null"]
            case "object":
                return self._of_object(_mapping(described.get("properties")), depth)
            case "array":
                return [self._of_list(described, depth)]
        return [GAP]

    def _of_object(self, properties: Mapping[str, Any], depth: int) -> list[str]:
        """Return forms with every key in order. The first value with several forms makes several objects."""
        if not properties:
            return [GAP]
        bodies = [""]
        for key, described in properties.items():
            values = self.of(described, depth + 1)
            if len(values) > 1 and len(bodies) > 1:
                values = [GAP]
            before = self._text(key) + self._colon
            bodies = [(body + self._comma if body else "") + before + value for body in bodies for value in values]
        return [f"{{{body}}}" for body in bodies]

    def _of_list(self, described: Mapping[str, Any], depth: int) -> str:
        """Return the form of a list: with as many items as the schema fixes, else with some and a gap for the rest."""
        min_items, max_items = (_count(described.get(key)) for key in ("minItems", "maxItems"))
        values = self.of(described.get("items"), depth + 1)
        item = values[0] if len(values) == 1 else GAP
        if min_items == max_items and min_items:
            return f"[{self._comma.join([item] * min_items)}]"
        return f"[{self._comma.join([item] * max(1, min(_ITEMS, max_items or _ITEMS)))}{GAP}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return min(value, 64) if isinstance(value, int) and value > 0 else 0
