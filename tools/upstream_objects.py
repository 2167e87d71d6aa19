"""Replaces each app object that a test makes by `accelerate(object)`, at the place where the test holds it.

The test modules are rewritten when they are imported: each call, `await` and `|` in a test's own code passes its
result through `replace`. So a chain, retriever, query engine or workflow is accelerated whoever constructs it
(a constructor, `from_llm`, `as_query_engine()`, a fixture), and the test then uses its methods and fields, sets fields,
checks its class and makes it a part of other objects.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
from _pytest.assertion import rewrite
from upstream_graphs import fail_on_fallback, fake_pool

MODES = {
    "default": "accelerate(object): chains, retrievers, agents, query engines, workflows",
    "all": "the same, and each other Runnable: models, tools, prompts, parsers",
    "pool": 'accelerate(object, pool=pool, speculate="all")',
}
APP_CLASSES = (
    "langchain_core.runnables:Runnable",
    "llama_index.core.base.base_query_engine:BaseQueryEngine",
    "llama_index.core.base.base_retriever:BaseRetriever",
    "llama_index.core.response_synthesizers:BaseSynthesizer",
    "llama_index.core.chat_engine.types:BaseChatEngine",
    "llama_index.core.ingestion:IngestionPipeline",
    "llama_index.core:VectorStoreIndex",
    "workflows:Workflow",
)
"""Classes whose objects are accelerated, as `module:name`; those that are not installed are left out."""
PART_CLASSES = (
    "langchain_core.language_models:BaseLanguageModel",
    "langchain_core.tools:BaseTool",
    "langchain_core.prompts:BasePromptTemplate",
    "langchain_core.output_parsers.base:BaseLLMOutputParser",
)
"""Runnables that apps are made of; only mode `all` accelerates them."""
HELPER_MODULES = ("tests", "langchain_tests")
"""Packages with helpers and standard tests, which are rewritten like the test modules."""
REPLACE = "__teola_replace__"
"""The builtin that rewritten code calls."""

Definition = TypeVar("Definition", ast.FunctionDef, ast.AsyncFunctionDef)
_is_accelerating: ContextVar[bool] = ContextVar("teola_is_accelerating", default=False)


class Routing:
    """Rewrites test modules and accelerates what they make. `calls`: per test, how many objects were replaced."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self._test = ""
        self._options: dict[str, Any] = {}
        self._pool: Any = None
        self._replacements: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    @property
    def test(self) -> str:
        return self._test

    @test.setter
    def test(self, name: str) -> None:
        self._test = name
        self._replacements.clear()

    def start(self) -> None:
        importlib.import_module("teola_plugin.adapters")
        self._classes = _load_classes(APP_CLASSES)
        self._part_classes = () if self.mode == "all" else _load_classes(PART_CLASSES)
        if self.mode == "pool":
            self._pool = fake_pool()
            self._options = {"pool": self._pool, "speculate": "all"}
        setattr(builtins, REPLACE, self.replace)
        pytest.register_assert_rewrite(*HELPER_MODULES)
        rewrite.rewrite_asserts = _rewrite_before(rewrite.rewrite_asserts)
        fail_on_fallback()

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def replace(self, value: Any) -> Any:
        """Return the accelerated object for an app object, the same one within a test; other values unchanged."""
        cls = type(value)
        if not issubclass(cls, self._classes) or issubclass(cls, self._part_classes) or _is_accelerating.get():
            return value
        if hasattr(cls, "__teola_accelerated__"):
            return value
        if id(value) in self._replacements:
            original, replacement = (reference() for reference in self._replacements[id(value)])
            if original is value and replacement is not None:
                return replacement
        replacement = self._accelerate(value)
        self._replacements[id(value)] = weakref.ref(value), weakref.ref(replacement)  # some tests collect garbage
        return replacement

    def _accelerate(self, value: Any) -> Any:
        from teola_plugin import accelerate

        self.calls[self.test]["object"] += 1
        token = _is_accelerating.set(True)
        try:
            return accelerate(value, **self._options)
        finally:
            _is_accelerating.reset(token)


def _load_classes(names: tuple[str, ...]) -> tuple[type, ...]:
    classes = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            classes.append(getattr(importlib.import_module(module), attribute))
        except ModuleNotFoundError:
            continue
    return tuple(classes)


def _rewrite_before(rewrite_asserts: Callable[..., None]) -> Callable[..., None]:
    """Return pytest's rewriting of a module's assertions, with ours before it."""

    def rewrite_module(tree: ast.Module, *args: Any, **kwargs: Any) -> None:
        ast.fix_missing_locations(ReplaceResults().visit(tree))
        rewrite_asserts(tree, *args, **kwargs)

    return rewrite_module


class ReplaceResults(ast.NodeTransformer):
    """Passes results through `replace`.

    Lambdas, and functions inside functions, stay as they are: those are nodes and steps of apps, whose source the
    accelerator reads.
    """

    def __init__(self) -> None:
        self._is_in_function = False

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_function(node)

    def _visit_function(self, node: Definition) -> Definition:
        if not self._is_in_function:
            self._is_in_function = True
            for statements in (node.decorator_list, node.body):
                statements[:] = [self.visit(statement) for statement in statements]
            self._is_in_function = False
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self._pass_on(node)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self._pass_on(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        return self._pass_on(node) if isinstance(node.op, ast.BitOr) else self.generic_visit(node)

    def _pass_on(self, node: ast.expr) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(ast.Name(REPLACE, ast.Load()), [node], [])
        return ast.copy_location(call, node)
