"""Structured output: a JSON schema for the engine, one of LangChain's own parsers behind it."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.language_models.base import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from teola_plugin.errors import unknown_name

_METHODS = ("json_schema", "function_calling", "json_mode")
"""All are the same here: the engine can only write what the schema allows."""


def structured_output(
    model: BaseChatModel,
    schema: dict[str, Any] | type,
    *,
    include_raw: bool = False,
    method: str = "json_schema",
    strict: bool | None = None,
    **unknown: Any,
) -> Runnable[LanguageModelInput, Any]:
    """`model` bound to `schema`, then its parser. Raises `RegistrationError` for another method or argument."""
    for name in unknown:
        raise unknown_name("argument of with_structured_output", name, ["include_raw", "method", "strict"])
    if method not in _METHODS:
        raise unknown_name("method of with_structured_output", method, list(_METHODS))
    format_shown = {"kwargs": {"method": "json_schema", "strict": strict}, "schema": _schema_for_models(schema)}
    bound = model.bind(json_schema=json_schema_of(schema), ls_structured_output_format=format_shown)
    parser = _parser(schema)
    return _with_raw(bound, parser) if include_raw else bound | parser


def json_schema_of(schema: dict[str, Any] | type) -> dict[str, Any]:
    """A JSON schema as it is; that of a pydantic class; anything else as LangChain describes it."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        describe = getattr(schema, "model_json_schema", None) or schema.schema  # type: ignore[attr-defined]
        return describe()  # type: ignore[no-any-return]
    plain = isinstance(schema, dict) and "parameters" not in schema and "function" not in schema
    return schema if plain else convert_to_json_schema(schema)  # type: ignore[return-value]


def _schema_for_models(schema: dict[str, Any] | type) -> dict[str, Any]:
    """The schema as LangChain's tracers expect it; one that has no title cannot be written that way."""
    return (
        json_schema_of(schema) if isinstance(schema, dict) and "title" not in schema else convert_to_json_schema(schema)
    )


def _parser(schema: dict[str, Any] | type) -> BaseOutputParser[Any]:
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def _with_raw(model: Runnable[Any, Any], parser: BaseOutputParser[Any]) -> Runnable[LanguageModelInput, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
