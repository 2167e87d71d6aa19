"""Tests that methods of pool-backed objects have the parameters of the frameworks' base classes, in the same order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import BaseModel

from teola_plugin import langchain, llamaindex
from teola_plugin.adapters.langchain.vectorstore import TeolaRetriever

CLASSES: list[tuple[type, type]] = [
    (VectorStore, langchain.TeolaVectorStore),
    (VectorStoreRetriever, TeolaRetriever),
    (Embeddings, langchain.TeolaEmbeddings),
    (BaseChatModel, langchain.ChatTeola),
    (BaseLLM, langchain.TeolaLLM),
    (BaseDocumentCompressor, langchain.TeolaRerank),
    (BasePydanticVectorStore, llamaindex.TeolaVectorStore),
    (BaseEmbedding, llamaindex.TeolaEmbedding),
    (FunctionCallingLLM, llamaindex.TeolaLLM),
    (BaseNodePostprocessor, llamaindex.TeolaRerank),
]
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def overridden_methods() -> list[Any]:
    methods = []
    for base, own in CLASSES:
        for name, method in inspect.getmembers(base, inspect.isroutine):
            overrides = inspect.getattr_static(own, name) is not inspect.getattr_static(base, name)
            if overrides and not name.startswith("_") and name not in dir(BaseModel):
                label = f"{own.__module__.split('.')[-2]}.{own.__name__}.{name}"
                methods.append(pytest.param(method, getattr(own, name), id=label))
    return methods


@pytest.mark.parametrize(("method", "own"), overridden_methods())
def test_methods_accept_the_arguments_of_the_base_class(method: Any, own: Any) -> None:
    parameters = inspect.signature(method).parameters.values()
    by_keyword = {one.name: one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    by_position = [one.name for one in parameters if one.kind not in _VARIABLE and one.name not in by_keyword]
    by_either = {one.name: one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    by_either.pop("self", None)
    more = {"more": 1} if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters) else {}
    signature = inspect.signature(own)

    bound = signature.bind_partial(*by_position, **by_keyword, **more)
    signature.bind_partial(*by_position[: by_position[:1] == ["self"]], **by_either, **by_keyword, **more)

    assert list(bound.args)[: len(by_position)] == by_position
    for one in parameters:
        if one.name in signature.parameters:
            assert signature.parameters[one.name].default == one.default


@pytest.mark.parametrize("own", [langchain.TeolaVectorStore, langchain.TeolaEmbeddings, llamaindex.TeolaVectorStore])
def test_no_public_method_is_inherited_from_a_raising_base_class(own: type) -> None:
    missing = [
        name
        for name, method in inspect.getmembers(own, inspect.isfunction)
        if not name.startswith("_") and "NotImplementedError" in method.__code__.co_names
    ]

    assert missing == []
