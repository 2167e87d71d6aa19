"""Output parsers that understand a few answers only: routers' and judges'."""

from __future__ import annotations

from typing import Any

from langchain_core.output_parsers import BaseOutputParser

_MODULES = "langchain_classic.output_parsers.", "langchain_classic.retrievers.document_compressors."
_FIELDS = {"BooleanOutputParser": ("true_val", "false_val"), "NoOutputParser": ("no_output_str",)}
"""Classes -> where they keep the answers that they know."""
_MOST = 16


def labels_of(parser: BaseOutputParser[Any]) -> tuple[str, ...]:
    """Only for drafts, which a model verifies: nothing depends on it."""
    for cls in type(parser).__mro__:
        if not cls.__module__.startswith(_MODULES):
            continue
        if cls.__name__ in _FIELDS:
            return _texts([getattr(parser, name, None) for name in _FIELDS[cls.__name__]])
        if cls.__name__ == "EnumOutputParser":
            return _texts([getattr(one, "value", None) for one in getattr(parser, "enum", ())])
    return ()


def _texts(values: list[Any]) -> tuple[str, ...]:
    return tuple(value for value in values[:_MOST] if isinstance(value, str))
