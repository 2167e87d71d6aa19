"""The options of a generation: its sampling parameters, and the tools that the model may call.

Sampling parameters are fields of the model, overridden by the keyword arguments of one call.

Tools are described to an engine in the same way for every framework; the model's own chat template writes them into the
prompt. Where a call is demanded, the engine can write nothing else; otherwise the model decides, and `tool_calls` tells
how it writes a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine
from teola_plugin.adapters.tool_calls import Call, read
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.graph import DraftText
from teola_plugin.requests.draft_texts import forms_of_tools
from teola_plugin.requests.json_forms import forms_of_schema
from teola_plugin.requests.payloads import Sampling

_PLAIN = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
_OF_THE_FRAMEWORK = frozenset({"stream", "ls_structured_output_format", "structured_output_format"})
"""Arguments that LangChain reads itself and passes on."""

_READ: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict"),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "seed": ("seed",),
    "stop": ("stop", "stop_sequences"),
}
"""Sampling parameter of the engine -> the names under which models keep it; None there means not set."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repeat_penalty": (None, 1, 1.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "extra_body": (None, {}),
}
"""Parameters that the engine does not have, and the values by which they change nothing."""
_HINT = "take the parameter out, or leave the model unbound"


class EngineModel(BaseModel):
    """The common base of `ChatTeola` and `TeolaLLM`: an LLM engine of a pool and the default sampling parameters."""

    pool: PoolField = Field(exclude=True, repr=False)
    """The `EnginePool`; shared by copies, never serialised."""
    engine: str = "llm"
    """Name of the engine in the pool."""
    model_name: str = ""
    """For traces and `response_metadata`; when empty, the engine's model, else the engine's name."""
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    seed: int | None = None
    stop: Sequence[str] = ()
    json_schema: str | dict[str, Any] = ""
    """A JSON schema that every answer follows."""
    ignore_eos: bool = False

    model_config = ConfigDict(protected_namespaces=())

    def model_post_init(self, context: Any) -> None:
        """Check the engine, and take its model's name if none is given. Pydantic calls it after validation.

        Raise `RegistrationError` if there is no pool, or if it has no such engine.
        """
        super().model_post_init(context)
        check_engine(self.pool, self.engine)
        self.model_name = self.model_name or self.pool.versions()[self.engine].get("model") or self.engine

    def sampling(self, stop: Sequence[str] | str | None = None, kwargs: Mapping[str, Any] | None = None) -> Sampling:
        """Return the sampling of one call. Raise `RegistrationError` for unknown arguments and bad values."""
        arguments = {key: value for key, value in (kwargs or {}).items() if key not in _OF_THE_FRAMEWORK}
        stop = arguments.pop("stop", None) if stop is None else stop
        schema = _schema_of(arguments, self.json_schema)
        for name in arguments:
            if name not in _PLAIN:
                names = [*_PLAIN, "stop", "json_schema", "response_format"]
                raise unknown_name(f"argument of {type(self).__name__}", name, names)
        values = {name: getattr(self, name) if arguments.get(name) is None else arguments[name] for name in _PLAIN}
        _check_sampling(values)
        stop = self.stop if stop is None else stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Sampling(**values, stop=stops, json_schema=schema_text(schema))

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = ("engine", "model_name", *_PLAIN, "stop", "json_schema")
        values = {name: getattr(self, name) for name in names}
        return {**values, "stop": list(self.stop), "json_schema": schema_text(self.json_schema)}


def schema_text(schema: str | Mapping[str, Any]) -> str:
    """Return the schema as compact JSON text, its keys in their order (models write properties in that order)."""
    try:
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema) if schema else ""
    except (TypeError, ValueError) as error:
        raise RegistrationError(
            f"the JSON schema is not JSON: {error}.", hint="pass a dict of plain values, or JSON text"
        ) from error


def list_shape(schema: str) -> tuple[str, int | None]:
    """Return ("json", number of items if it is fixed) for an array, or an object with one array among its fields.

    Return ("", None) for any other schema.
    """
    array = _array_of(json.loads(schema) if schema else {})
    if array is None:
        return "", None
    min_items, max_items = array.get("minItems"), array.get("maxItems")
    return "json", min_items if min_items == max_items else None


def schema_drafts(schema: str, tools: str = "") -> tuple[DraftText, ...]:
    """Return texts that answers may be, or begin with, by a JSON schema or by callable tools, both as JSON text."""
    source = "the form of its JSON" if schema else "calls of its tools, earlier ones first"
    forms = forms_of_schema(schema) if schema else forms_of_tools(tools) if tools else ()
    return tuple(DraftText(source, text=form, in_request=True) for form in forms)


def _array_of(described: Any) -> dict[str, Any] | None:
    """Return the schema of the one list that is written; None if there is none, or several."""
    if not isinstance(described, dict):
        return None
    if described.get("type") == "array":
        return described
    fields = described.get("properties") if described.get("type") == "object" else None
    arrays = [one for one in (fields or {}).values() if isinstance(one, dict) and one.get("type") == "array"]
    return arrays[0] if len(arrays) == 1 else None


def _schema_of(arguments: dict[str, Any], default: str | dict[str, Any]) -> str | dict[str, Any]:
    """Remove `json_schema` and `response_format` (as OpenAI spells it) from the arguments, and return the schema."""
    schema, response_format = arguments.pop("json_schema", None), arguments.pop("response_format", None)
    if schema is not None or response_format is None:
        return default if schema is None else schema  # type: ignore[no-any-return]
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    match kind:
        case "json_schema":
            return response_format["json_schema"].get("schema", response_format["json_schema"])  # type: ignore[no-any-return]
        case "json_object":
            return {"type": "object"}
        case "text":
            return ""
    raise unknown_name("response_format", str(kind), ["json_schema", "json_object", "text"])


def _check_sampling(values: Mapping[str, Any]) -> None:
    """Raise `RegistrationError` for the first sampling parameter that is out of its range."""
    limits = {
        "max_tokens": values["max_tokens"] >= 1,
        "temperature": values["temperature"] >= 0,
        "top_p": 0 < values["top_p"] <= 1,
        "top_k": values["top_k"] >= 0,
    }
    wrong = next((name for name, fine in limits.items() if not fine), None)
    if wrong:
        raise RegistrationError(f"{wrong}={values[wrong]!r} is out of its range.", hint="see `Sampling` for the ranges")


# ------------------------------------------------------------ models of others


def sampling_fields(model: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `EngineModel` that decodes as `model` does, which also sends `more` to its provider.

    Raise `RegistrationError` for what the engine cannot do.
    """
    name = type(model).__name__
    values: dict[str, Any] = {}
    for parameter, names in _READ.items():
        values_set = [v for n in names if (v := more.pop(n, None)) is not None or (v := _value(model, n)) is not None]
        if values_set:
            values[parameter] = (
                [values_set[0]] if parameter == "stop" and isinstance(values_set[0], str) else values_set[0]
            )
    for name_of_refused, neutral_values in _REFUSED.items():
        value = more.pop(name_of_refused, _value(model, name_of_refused))
        if value not in neutral_values:
            raise RegistrationError(f"{name} has {name_of_refused}={value!r}, which the engine cannot do.", hint=_HINT)
    if more:
        raise RegistrationError(f"{name} has parameters that the engine does not know: {sorted(more)}.", hint=_HINT)
    return values


def _value(model: Any, name: str) -> Any:
    value = vars(model).get(name)
    return None if callable(value) else value


ANY = ("any", "required")
ARGUMENTS = ("tools", "tool_choice", "strict", "parallel_tool_calls")
"""Arguments of a call that are about tools, as OpenAI's clients name them."""


@dataclass(frozen=True, slots=True)
class ToolText:
    """The tools of a call, as text for the engine."""

    definitions: str
    """JSON text, as OpenAI describes tools."""
    names: tuple[str, ...]
    schema: str
    """JSON text of what must be written; empty where the model decides."""

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return the text of an answer around its calls, and the calls."""
        return read(text, self.names)


def tool_names(tools: Sequence[Any]) -> list[str]:
    """Return the names of tools as OpenAI describes them. Raise `RegistrationError` for what is no such description."""
    return [_function_of(tool, f"tools.{at}")["name"] for at, tool in enumerate(tools)]


def check_parameters(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RegistrationError` where the parameters of a tool are no schema of an object that an engine can follow."""
    for at, tool in enumerate(tools):
        parameters, field = tool["function"].get("parameters"), f"tools.{at}.function.parameters"
        if parameters is None:
            continue
        check_schema(parameters, field)
        types = parameters.get("type", "object")
        if "object" not in ([types] if isinstance(types, str) else types):
            raise _malformed(field, "the arguments of a call are an object", 'say "type": "object"')


def _function_of(tool: Any, field: str) -> Mapping[str, Any]:
    """Return the function in a tool that is described as OpenAI describes tools.

    Raise `RegistrationError`, which names the wrong part, for any other description. `field`: where the tool stands in
    the request.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise _malformed(field, "it is no function", _TOOL_HINT)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise _malformed(f"{field}.function.name", "it is no text", _TOOL_HINT)
    if not isinstance(function.get("description"), str | None):
        raise _malformed(f"{field}.function.description", "it is no text", _TOOL_HINT)
    if not isinstance(function.get("parameters"), Mapping | None):
        raise _malformed(f"{field}.function.parameters", "it is no JSON schema", _TOOL_HINT)
    return function


_TOOL_HINT = 'describe it as {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'


def _malformed(field: str, reason: str, hint: str) -> RegistrationError:
    return RegistrationError(f"{field}: {reason}.", hint=hint)


def tool_text(definitions: Sequence[Mapping[str, Any]], choice: str) -> ToolText | None:
    """Return the text of tools as OpenAI describes them; None if no tool may be called.

    `choice`: as `parse_tool_choice` returns it.

    Raise `RegistrationError` where a call is demanded whose parameters are no schema.
    """
    if not definitions or choice == "none":
        return None
    names = tuple(tool["function"]["name"] for tool in definitions)
    if not choice:
        return ToolText(json.dumps(definitions), names, "")
    check_parameters(definitions)
    called = [tool["function"] for tool in definitions if choice in ("any", tool["function"]["name"])]
    return ToolText(json.dumps(definitions), names, call_schema(called))


def parse_tool_choice(choice: Any, names: Sequence[str]) -> str:
    """Return the name of a tool, `any`, `none`, or an empty text if the model decides.

    Raise `RegistrationError` for a choice of another form, for the name of no tool, and for a demand without tools.
    """
    word = _choice_word(choice)
    if word in ("", "auto"):
        return ""
    if word == "none":
        return word
    if not names:
        raise RegistrationError(
            "tool_choice demands a call, and there are no tools.", hint="give tools, or leave it out"
        )
    if word in ANY:
        return "any"
    if word not in names:
        raise unknown_name("tool_choice", word, [*names, "any", "auto", "none", "required"])
    return word


def _choice_word(choice: Any) -> str:
    """Return the one word that a choice comes down to, in whichever framework's form it is."""
    if choice is None or isinstance(choice, bool):
        return "any" if choice else ""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    if kind in ("auto", "none", *ANY):
        return str(kind)
    if kind in ("function", "tool"):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name:
            return name
        raise _malformed("tool_choice", "it names no function", _CHOICE_HINT)
    if kind == "allowed_tools":
        hint = "send those tools alone, with tool_choice auto or required"
        raise _malformed("tool_choice", "allowed_tools is not supported", hint)
    raise _malformed("tool_choice", "it has none of the forms of a choice", _CHOICE_HINT)


_CHOICE_HINT = 'use "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'


# ------------------------------------------------------------ JSON schemas

_DEFINITIONS = ("$defs", "definitions")
_MAPS_OF_SCHEMAS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = (
    *("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "contains"),
    *("propertyNames", "not", "if", "then", "else"),
)
_SCHEMA_HINT = "see json-schema.org for the form of a schema"


def check_schema(schema: Any, field: str) -> None:
    """Raise `RegistrationError` for a JSON schema that is malformed, or whose references lead nowhere."""
    for at, part in _subschemas(schema, field):
        reference = part.get("$ref")
        if reference is not None:
            _follow(schema, reference, f"{at}.$ref")
        types = part.get("type", [])
        if not isinstance(types, str) and not _is_list_of_texts(types):
            raise _malformed(f"{at}.type", "it is neither the name of a type nor a list of them", _SCHEMA_HINT)
        if not _is_list_of_texts(part.get("required", [])):
            raise _malformed(f"{at}.required", "it is no list of names", _SCHEMA_HINT)
        if not isinstance(part.get("enum", []), list):
            raise _malformed(f"{at}.enum", "it is no list", _SCHEMA_HINT)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _subschemas(schema: Any, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each schema within a schema, and the schema. True and False are schemas, too."""
    pending = [(field, schema)]
    while pending:
        at, part = pending.pop()
        if isinstance(part, bool) and at != field:
            continue
        if not isinstance(part, Mapping):
            raise _malformed(at, "it is no JSON schema", _SCHEMA_HINT)
        yield at, part
        for key in _MAPS_OF_SCHEMAS:
            inner = part.get(key, {})
            if not isinstance(inner, Mapping):
                raise _malformed(f"{at}.{key}", "it is no object of schemas", _SCHEMA_HINT)
            pending += [(f"{at}.{key}.{name}", one) for name, one in inner.items()]
        for key in _LISTS_OF_SCHEMAS:
            inner = part.get(key, [])
            if not isinstance(inner, list):
                raise _malformed(f"{at}.{key}", "it is no list of schemas", _SCHEMA_HINT)
            pending += [(f"{at}.{key}.{number}", one) for number, one in enumerate(inner)]
        for key in _SCHEMAS:
            if key == "items" and isinstance(part.get(key), list):  # of tuples, before draft 2020-12
                pending += [(f"{at}.{key}.{number}", one) for number, one in enumerate(part[key])]
            elif key in part:
                pending.append((f"{at}.{key}", part[key]))


def _follow(schema: Mapping[str, Any], reference: Any, field: str) -> None:
    """Raise `RegistrationError` unless a reference leads, by others or not, to a part of the schema itself."""
    followed: set[str] = set()
    while reference is not None:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _malformed(field, f"{reference!r:.80} is no reference into the schema itself", 'e.g. "#/$defs/name"')
        if reference in followed:
            raise _malformed(field, f"{reference!r:.80} leads back to itself, and to no schema", _SCHEMA_HINT)
        followed.add(reference)
        part: Any = schema
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list) and name.isascii() and name.isdigit() and int(name[:9]) < len(part):
                part = part[int(name[:9])]
            elif isinstance(part, Mapping) and name in part:
                part = part[name]
            else:
                raise _malformed(field, f"{reference!r:.80} leads nowhere", "define it in $defs of the same schema")
        if not isinstance(part, Mapping | bool):
            raise _malformed(field, f"{reference!r:.80} leads to no schema", _SCHEMA_HINT)
        reference = part.get("$ref") if isinstance(part, Mapping) else None


def call_schema(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON text of the schema of one call of one of the functions, whose parameters are well formed.

    Definitions move to the top, where engines look for them. Functions with different definitions of one name get names
    of their own for them.
    """
    definitions: dict[str, dict[str, Any]] = {key: {} for key in _DEFINITIONS}
    originals: dict[str, dict[str, Any]] = {key: {} for key in _DEFINITIONS}
    schemas: list[dict[str, Any]] = []
    for at, function in enumerate(functions):
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        schemas_of_function = [
            (key, name, schema) for key in _DEFINITIONS for name, schema in parameters.pop(key, {}).items()
        ]
        has_conflict = any(originals[key].get(name, schema) != schema for key, name, schema in schemas_of_function)
        names = {
            (key, name): _free_name(name, originals[key]) if has_conflict else name
            for key, name, _ in schemas_of_function
        }
        moves = {_pointer(key, name): _pointer(key, new) for (key, name), new in names.items()}
        root = "#/properties/arguments" if len(functions) == 1 else f"#/anyOf/{at}/properties/arguments"
        for key, name, schema in schemas_of_function:
            originals[key][names[key, name]] = schema
            definitions[key][names[key, name]] = _moved(schema, moves, root)
        properties = {"name": {"enum": [function["name"]]}, "arguments": _moved(parameters, moves, root)}
        required = ["name", "arguments"]
        schemas += [{"type": "object", "properties": properties, "required": required, "additionalProperties": False}]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return json.dumps({**schema, **{key: inner for key, inner in definitions.items() if inner}})


def _free_name(name: str, occupied: Mapping[str, Any]) -> str:
    while name in occupied:
        name += "_"
    return name


def _pointer(key: str, name: str) -> str:
    return f"#/{key}/{name.replace('~', '~0').replace('/', '~1')}"


def _moved(value: Any, moves: Mapping[str, str], root: str, *, is_map: bool = False) -> Any:
    """Return a part of a schema whose references lead to where definitions, and the rest of the schema, have moved.

    `is_map`: the part is an object of schemas by name, not a schema.
    """
    if isinstance(value, list):
        return [_moved(item, moves, root) for item in value]
    if not isinstance(value, Mapping):
        return value
    if is_map:
        return {name: _moved(inner, moves, root) for name, inner in value.items()}
    moved = {
        key: inner if key in _DATA_OF_SCHEMAS else _moved(inner, moves, root, is_map=key in _MAPS_OF_SCHEMAS)
        for key, inner in value.items()
    }
    reference = value.get("$ref")
    if isinstance(reference, str):
        definition = "/".join(reference.split("/")[:3])
        begin = moves.get(definition) or root + definition.removeprefix("#")
        moved["$ref"] = begin + reference.removeprefix(definition)
    return moved


_DATA_OF_SCHEMAS = ("enum", "const", "default", "examples")
