"""How to decode: fields of the model, overridden by the keyword arguments of one call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from teola_plugin.adapters.calls import PoolField, check_engine
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
"""What the engine cannot do, and the values that ask for nothing."""
_HINT = "take the parameter out, or leave the model unbound"


class EngineModel(BaseModel):
    """What `ChatTeola` and `TeolaLLM` have in common: an LLM engine of a pool and how to decode by default."""

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
        super().model_post_init(context)
        check_engine(self.pool, self.engine)
        self.model_name = self.model_name or self.pool.versions()[self.engine].get("model") or self.engine

    def sampling(self, stop: Sequence[str] | str | None = None, kwargs: Mapping[str, Any] | None = None) -> Sampling:
        """How one call decodes. Raises `RegistrationError` for an argument that is not known or makes no sense."""
        given = {key: value for key, value in (kwargs or {}).items() if key not in _OF_THE_FRAMEWORK}
        stop = given.pop("stop", None) if stop is None else stop
        schema = _schema_of(given, self.json_schema)
        for name in given:
            if name not in _PLAIN:
                known = [*_PLAIN, "stop", "json_schema", "response_format"]
                raise unknown_name(f"argument of {type(self).__name__}", name, known)
        values = {name: getattr(self, name) if given.get(name) is None else given[name] for name in _PLAIN}
        _check(values)
        return Sampling(**values, stop=_stops(self.stop if stop is None else stop), json_schema=schema_text(schema))

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = ("engine", "model_name", *_PLAIN, "stop", "json_schema")
        values = {name: getattr(self, name) for name in names}
        return {**values, "stop": list(self.stop), "json_schema": schema_text(self.json_schema)}


def schema_text(schema: str | Mapping[str, Any]) -> str:
    """The schema as compact JSON text, its keys in their order (models write properties in that order)."""
    try:
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema) if schema else ""
    except (TypeError, ValueError) as error:
        raise RegistrationError(
            f"the JSON schema is not JSON: {error}.", hint="pass a dict of plain values, or JSON text"
        ) from error


def list_shape(schema: str) -> tuple[str, int | None]:
    """("json", number of items if the schema fixes it) for an array, or an object of which one field is an array;
    else ("", None)."""
    array = _array_of(json.loads(schema) if schema else {})
    if array is None:
        return "", None
    least, most = array.get("minItems"), array.get("maxItems")
    return "json", least if least == most else None


def forms_told(schema: str, tools: str = "") -> tuple[DraftText, ...]:
    """What answers may be, or begin with, by a JSON schema, or by the tools that may be called; both are JSON text."""
    what = "the form of its JSON" if schema else "calls of its tools, earlier ones first"
    found = forms_of_schema(schema) if schema else forms_of_tools(tools) if tools else ()
    return tuple(DraftText(what, text=form, told=True) for form in found)


def _array_of(described: Any) -> dict[str, Any] | None:
    """The schema of the list that is written; None where there is none, or several."""
    if not isinstance(described, dict):
        return None
    if described.get("type") == "array":
        return described
    fields = described.get("properties") if described.get("type") == "object" else None
    arrays = [one for one in (fields or {}).values() if isinstance(one, dict) and one.get("type") == "array"]
    return arrays[0] if len(arrays) == 1 else None


def _schema_of(given: dict[str, Any], default: str | dict[str, Any]) -> str | dict[str, Any]:
    """Takes `json_schema` and `response_format` (as OpenAI spells it) out of the arguments."""
    schema, wanted = given.pop("json_schema", None), given.pop("response_format", None)
    if schema is not None or wanted is None:
        return default if schema is None else schema  # type: ignore[no-any-return]
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    match kind:
        case "json_schema":
            return wanted["json_schema"].get("schema", wanted["json_schema"])  # type: ignore[no-any-return]
        case "json_object":
            return {"type": "object"}
        case "text":
            return ""
    raise unknown_name("response_format", str(kind), ["json_schema", "json_object", "text"])


def _stops(stop: Sequence[str] | str) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _check(values: Mapping[str, Any]) -> None:
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
    """Fields of an `EngineModel` that decodes as `model` is set up to, which also sends `more` to its provider.

    Raises `RegistrationError` for what the engine cannot do.
    """
    name = type(model).__name__
    values: dict[str, Any] = {}
    for wanted, names in _READ.items():
        given = [v for n in names if (v := more.pop(n, None)) is not None or (v := _value(model, n)) is not None]
        if given:
            values[wanted] = [given[0]] if wanted == "stop" and isinstance(given[0], str) else given[0]
    for refused, nothing in _REFUSED.items():
        value = more.pop(refused, _value(model, refused))
        if value not in nothing:
            raise RegistrationError(f"{name} has {refused}={value!r}, which the engine cannot do.", hint=_HINT)
    if more:
        raise RegistrationError(f"{name} has parameters that the engine does not know: {sorted(more)}.", hint=_HINT)
    return values


def _value(model: Any, name: str) -> Any:
    value = vars(model).get(name)
    return None if callable(value) else value
