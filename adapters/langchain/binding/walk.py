"""Objects replaced wherever they sit: in composites, retrievers, compressors; the user's own are never changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import BaseModel

from teola_plugin.tracer.langchain.classes import is_accelerated

Make = Callable[[Any, Mapping[str, Any]], Any]
"""(object, arguments bound to it where it stands) -> what stands there instead, or the very same object."""

_LOOKED_INTO = (Runnable, BaseDocumentCompressor, BaseDocumentTransformer, Embeddings)


def replaced(node: Any, make: Make, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of whatever is around replaced objects; the very same object where nothing is replaced.

    Fields of Pydantic objects of the framework are looked into, and lists, tuples and dicts there. Functions,
    vector stores, compiled graphs and what a model is made of are not.
    """
    arguments = kwargs or {}
    replacement = make(node, arguments)
    if replacement is not node:
        return replacement
    if type(node) in (list, tuple):
        items = [replaced(item, make) for item in node]
        return node if _all_same(node, items) else type(node)(items)
    if type(node) is dict:
        inner = {key: replaced(value, make) for key, value in node.items()}
        return node if _all_same(node.values(), inner.values()) else inner
    if not isinstance(node, BaseModel) or not isinstance(node, _LOOKED_INTO) or isinstance(node, BaseLanguageModel):
        return node
    if is_accelerated(node):  # on terms of its own
        return node
    return _with_fields(node, make, arguments)


def _with_fields(node: Any, make: Make, kwargs: Mapping[str, Any]) -> Any:
    names = [name for name in type(node).model_fields if name in vars(node)]
    fields = {name: replaced(vars(node)[name], make, _handed_on(node, name, kwargs)) for name in names}
    new = {name: value for name, value in fields.items() if value is not vars(node)[name]}
    if not new:
        return node
    copied = node.model_copy(update=new)
    for name in [name for name in vars(copied) if isinstance(getattr(type(node), name, None), cached_property)]:
        del vars(copied)[name]  # it was computed from what is replaced
    return copied


def _handed_on(node: Any, name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments with which a part is called, as far as they are bound."""
    if isinstance(node, RunnableBindingBase) and name == "bound":
        return {**node.kwargs, **kwargs}
    return kwargs if isinstance(node, RunnableSequence) and name == "first" else {}


def _all_same(before: Any, after: Any) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))
