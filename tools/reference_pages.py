"""Texts of the reference that are made of the code: settings in YAML, addresses of the server, metrics.

`pytest --update-golden tests/test_docs.py -k generated_texts` writes them into docs/reference-*.md. Meanings are the
docstrings below the fields and in the functions of the routes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from teola_plugin import errors
from teola_plugin.cluster.config import Kind
from teola_plugin.engines.base import EngineLoad
from teola_plugin.server.callers import RequestHeaders
from teola_plugin.server.errors import http_error
from teola_plugin.server.metrics import Metrics
from teola_plugin.server.routes import files, messages, openai, operations, queries
from teola_plugin.server.settings import ServiceConfig
from teola_plugin.server.wire.requests import Body

ENGINE_CLASSES = {
    "vllm": "VllmEngine",
    "embedding": "EmbeddingEngine",
    "reranking": "RerankingEngine",
    "pgvector": "PgVectorEngine",
    "openai": "OpenAIServer",
    "embedding_server": "EmbeddingServer",
    "reranking_server": "RerankingServer",
    "websearch": "WebSearchEngine",
    "fulltext": "FullTextSearch",
    "tools": "ToolEngine",
    "fake": "fake_engines",
}
"""The class of `teola_plugin.engines` by the kind of an engine in YAML: its arguments are the `options`."""
PURPOSES = {
    "vllm": "an LLM that vLLM runs",
    "embedding": "an embedding model of sentence-transformers",
    "reranking": "a reranking model of sentence-transformers",
    "pgvector": "a vector store in PostgreSQL with pgvector",
    "openai": "an LLM behind an OpenAI-compatible server",
    "embedding_server": "an embedding model behind an OpenAI-compatible server",
    "reranking_server": "a reranking model behind a server that has `/rerank`",
    "websearch": "a web search by SearXNG, Brave or Tavily",
    "fulltext": "a full-text search in PostgreSQL",
    "tools": "functions of yours, as tools",
    "fake": "an engine for tests, which computes nothing",
}
_TYPES = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Any: "any value"}
_LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
_ROUTERS = {
    "Models of the pool": openai.router,
    "Anthropic's protocol": messages.router,
    "Queries as resources": queries.router,
    "Documents": files.router,
    "Operation": operations.router,
}


# ------------------------------------------------------------ settings


def settings_reference() -> str:
    """Return the tables of all settings in a pool's YAML, one for each level, and the table of kinds of engines."""
    lines: list[str] = []
    for path, model in levels("", ServiceConfig):
        doc = _one_line(inspect.getdoc(model) or "") if path else "The keys at the top of the file."
        lines += [f"## {f'`{path}`' if path else 'The file'}", "", doc, ""]
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        texts = field_texts(model)
        for name, field in model.model_fields.items():
            cells = (f"`{name}`", _value_text(field), _default_text(field), texts.get(name, ""))
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
        lines.append("")
    lines += ["## Kinds of engines", "", "The `options` of an engine are the arguments of its class.", ""]
    lines += ["| `kind` | engine | class in `teola_plugin.engines` |", "|---|---|---|"]
    lines += [f"| `{kind}` | {PURPOSES[kind]} | `{ENGINE_CLASSES[kind]}` |" for kind in get_args(Kind)]
    return "\n".join(lines)


def levels(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a level of the settings and those below it: the path of its keys, and its model."""
    yield path, model
    for name, field in model.model_fields.items():
        for inner in _models_in(field.annotation):
            kind = get_origin(_without_none(field.annotation))
            suffix = ".NAME" if kind in (dict, Mapping) else "[]" if kind in (list, tuple) else ""
            yield from levels(f"{path}.{name}{suffix}".lstrip("."), inner)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _without_none(annotation: Any) -> Any:
    """Return the annotation without `None`; a union of other types stays as it is."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    types = [one for one in get_args(annotation) if one is not type(None)]
    return types[0] if len(types) == 1 else annotation


def _value_text(field: Any) -> str:
    """Return the kind of value that a setting takes, with its limits."""
    limits = []
    for constraint in field.metadata:
        values = {name: getattr(constraint, name, None) for name in _LIMITS}
        limits += [_LIMITS[name].format(_plain(value)) for name, value in values.items() if value is not None]
    return ", ".join([_type_text(field.annotation), *limits])


def _type_text(annotation: Any) -> str:
    """Return a type in words: `list of text`, `names with numbers`."""
    annotation = _without_none(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "settings"
    if origin in (list, tuple):
        return f"list of {_type_text(arguments[0])}"
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return f"names, each with {_type_text(arguments[1])}"
    return _TYPES.get(annotation, _type_text(arguments[0]) if arguments else "any value")


def _default_text(field: Any) -> str:
    """Return the default of a setting as YAML has it; empty where there is none, and for settings of their own."""
    if field.is_required():
        return "required"
    default = field.default
    if default in (None, "", (), []) or default is PydanticUndefined or isinstance(default, BaseModel):
        return ""
    if isinstance(default, tuple | list):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{_plain(default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


@cache
def field_texts(model: type[Any]) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, in one line each."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not base.__module__.startswith("teola_plugin"):
            continue
        [definition] = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, after in zip(definition.body, definition.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                texts[statement.target.id] = _one_line(ast.literal_eval(cast(ast.Expr, after).value))
    return texts


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


# ------------------------------------------------------------ HTTP


def http_reference() -> str:
    """Return the addresses of `teola serve` with their parameters, the headers of requests, and statuses of errors."""
    lines = ["Requests with a body take these fields, besides their own:", ""]
    lines += [f"* `{name}`: {text}" for name, text in field_texts(Body).items() if name in Body.model_fields]
    lines.append("")
    for title, router in _ROUTERS.items():
        lines += [f"## {title}", "", "| address | answer or effect |", "|---|---|"]
        routes = [cast(Any, route) for route in router.routes]
        for route in routes:
            parameters = [f"`?{one.alias}`" for one in route.dependant.query_params]
            query = f" Parameters: {', '.join(parameters)}." if parameters else ""
            doc = _one_line(inspect.getdoc(route.endpoint) or "").replace("|", r"\|")
            lines.append(f"| `{'`, `'.join(sorted(route.methods))} {_path_of(route)}` | {doc}{query} |")
        lines.append("")
        for route in routes:
            lines += _body_lines(route)
    lines += ["## Headers of a request", "", "| header | meaning |", "|---|---|"]
    texts = field_texts(RequestHeaders)
    lines += [f"| `{name}` | {texts[field]} |" for field, name in query_headers().items()]
    lines += ["", "## Statuses of errors", "", "| error of the pool | status | `code` |", "|---|--:|---|"]
    for error in error_classes():
        answer = http_error(error("failed."))
        if answer.status != 500 and error is not errors.EngineError:
            lines.append(f"| `{error.__name__}` | {answer.status} | `{answer.code}` |")
    lines.append("| others | 500 | `internal_error` |")
    return "\n".join(lines)


def _path_of(route: Any) -> str:
    return re.sub(r":\w+\}", "}", route.path)


def query_headers() -> dict[str, str]:
    """Return the names of the headers by which a request joins a query, by field of `RequestHeaders`."""
    return {name: f"X-Teola-{name.title()}" for name in RequestHeaders.__dataclass_fields__ if name != "since"}


def _body_lines(route: Any) -> list[str]:
    """Return the fields of the body of a route: a list of names, and the meanings that the code tells."""
    body = route.body_field.field_info.annotation if route.body_field is not None else None
    model = queries.Submission if route.endpoint is queries.submit else body
    if model is None:
        return []
    texts = field_texts(model)
    fields = [name for name in model.model_fields if name not in Body.model_fields]
    names = ", ".join(f"`{name}`" for name in fields)
    meanings = [f"* `{name}`: {texts[name]}" for name in fields if name in texts]
    return [f"`{_path_of(route)}` takes {names}.", "", *meanings, *[""] * bool(meanings)]


def error_classes() -> Sequence[type[errors.TeolaError]]:
    """Return the public error classes, in the order of their definition."""
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.TeolaError)]
    return [one for one in classes if one.__module__ == errors.__name__]


# ------------------------------------------------------------ metrics


def metrics_reference() -> str:
    """Return the table of the metrics that `/metrics` shows."""
    rows = []
    for name, kind, labels, text in sorted(metrics()):
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{one}`' for one in labels)} | {text} |")
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])


def metrics() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Return name, kind, labels and text of each metric of a server, which is made for this and serves nothing."""
    counts = SimpleNamespace(accepted=0, refused=0, answered=0, within_goal=0)
    replica = SimpleNamespace(load=lambda: EngineLoad(0, 0.0, {"app": 0}))
    service = SimpleNamespace(
        admission=SimpleNamespace(running=0, tokens=0, counts={"app": counts}),
        live=SimpleNamespace(running=()),
        pool=SimpleNamespace(
            engine_names=("engine",),
            replicas=lambda name: [replica],
            runtime=SimpleNamespace(recorder=SimpleNamespace(sink=None)),
        ),
    )
    registry = Metrics(cast(Any, service)).registry
    rows: list[tuple[str, str, tuple[str, ...], str]] = []
    for collector in registry._collector_to_names:  # the client has no public list of what is registered
        labels: tuple[str, ...] = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            shown_labels = [label for sample in family.samples[:1] for label in sample.labels if label != "le"]
            suffix = "_total" if family.type == "counter" else ""
            if family.name.startswith("teola_"):
                rows.append(
                    (f"{family.name}{suffix}", family.type, labels or tuple(shown_labels), family.documentation)
                )
    return rows
