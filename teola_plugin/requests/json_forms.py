"""Forms of JSON that follows a schema: its keys and what is fixed, with gaps for what the model says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from teola_plugin.graph import GAP

MOST_FORMS = 8
"""Of one schema: where a value is one of several, each is a form of its own."""
_DEEPEST = 6
_ITEMS = 4
"""Of a list whose length is not fixed."""
_LONGEST = 2000
"""Characters of a form; what comes behind them is left out."""


@lru_cache(maxsize=256)
def forms_of_schema(schema: str) -> tuple[str, ...]:
    """Of JSON text of a schema; empty where it fixes nothing. Without spaces, as vLLM's grammars write where these are
    not left to the model, then with them, as models do."""
    try:
        described = json.loads(schema) if schema else None
    except ValueError:
        return ()
    return tuple(dict.fromkeys((*forms(described, spaces=False), *forms(described))))


def forms(described: Any, *, spaces: bool = True) -> tuple[str, ...]:
    """Of a schema, at most `MOST_FORMS`, in the schema's own order; with spaces behind commas and colons, or not."""
    if not isinstance(described, Mapping):
        return ()
    definitions = _mapping(described.get("$defs") or described.get("definitions"))
    found = _Forms(definitions, " " if spaces else "").of(described, 0)
    ended = (_ended(form) for form in found)
    return tuple(dict.fromkeys(form for form in ended if form.strip(GAP + '"')))


def _ended(form: str) -> str:
    """With a gap, which makes it a form, also where all of it is fixed."""
    while GAP * 2 in form:
        form = form.replace(GAP * 2, GAP)
    form = form[:_LONGEST]
    return form if GAP in form else form + GAP


class _Forms:
    """`definitions`: what references look up; `space`: what stands behind commas and colons."""

    def __init__(self, definitions: Mapping[str, Any], space: str) -> None:
        self._definitions = definitions
        self._comma, self._colon = f",{space}", f":{space}"

    def _text(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(self._comma, self._colon))

    def of(self, described: Any, depth: int) -> list[str]:
        """At least one."""
        if not isinstance(described, Mapping) or depth > _DEEPEST:
            return [GAP]
        if "$ref" in described:
            return self.of(self._definitions.get(str(described["$ref"]).rpartition("/")[2]), depth + 1)
        if "const" in described:
            return [self._text(described["const"])]
        if values := _list(described.get("enum")):
            return [self._text(value) for value in values[:MOST_FORMS]]
        for several in ("anyOf", "oneOf", "allOf"):
            if parts := _list(described.get(several)):
                found = (form for part in parts for form in self.of(part, depth + 1))
                return list(dict.fromkeys(itertools.islice(found, MOST_FORMS)))
        return self._of_type(described, depth)

    def _of_type(self, described: Mapping[str, Any], depth: int) -> list[str]:
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
        """Every key in its order. The first value of which there are several makes several forms."""
        if not properties:
            return [GAP]
        made = [""]
        for key, described in properties.items():
            values = self.of(described, depth + 1)
            if len(values) > 1 and len(made) > 1:
                values = [GAP]
            before = self._text(key) + self._colon
            made = [(one + self._comma if one else "") + before + value for one in made for value in values]
        return [f"{{{one}}}" for one in made]

    def _of_list(self, described: Mapping[str, Any], depth: int) -> str:
        least, most = (_count(described.get(key)) for key in ("minItems", "maxItems"))
        values = self.of(described.get("items"), depth + 1)
        item = values[0] if len(values) == 1 else GAP
        if least == most and least:
            return f"[{self._comma.join([item] * least)}]"
        return f"[{self._comma.join([item] * max(1, min(_ITEMS, most or _ITEMS)))}{GAP}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return min(value, 64) if isinstance(value, int) and value > 0 else 0
