"""Calls of the framework: objects that it runs, and objects that it makes as the function would make them.

Only classes and methods of the framework are called while the source is read, with arguments that the source names.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from langchain_core.documents import Document
from langchain_core.documents.compressor import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import RunnableBranch, RunnableParallel, RunnableSequence
from langchain_core.tools import StructuredTool, Tool
from langchain_core.vectorstores import VectorStore

from teola_plugin.graph import Component, Role, UnfitValue, on_loop
from teola_plugin.shims.langchain import handlers_in, splitter_sizes, streams
from teola_plugin.shims.langchain_interceptors import SEARCH_METHODS
from teola_plugin.tracer.draft import mark_fallible
from teola_plugin.tracer.functions.bodies import map_items
from teola_plugin.tracer.functions.created_objects import (
    holds_plain_data,
    is_runnable,
    is_safe,
    is_splitter_class,
    try_build,
)
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import (
    is_framework_code,
    is_instance,
    read_object_attribute,
)
from teola_plugin.tracer.functions.operations import items_of
from teola_plugin.tracer.functions.symbols import (
    RUN_METHODS,
    UNKNOWN_VALUE,
    AwaitableValue,
    Fields,
    Item,
    ItemList,
    KnownValue,
    LocalFunction,
    Spread,
    Symbol,
    known_value,
    word_set,
)
from teola_plugin.tracer.langchain.classes import (
    has_branch,
    is_pool_backed,
    leaf_of,
    plain_condition,
    provider_method,
    steps_by_key,
    without_names,
)
from teola_plugin.tracer.leaf import EmbeddingLeaf
from teola_plugin.tracer.purity.data_classes import writes_itself
from teola_plugin.tracer.purity.purity import is_plain
from teola_plugin.tracer.symbols import NotUnderstood, Prompted

INHERITED_CALLBACKS = object()
"""Stands for the callbacks in the config that a function is called with, which its calls inherit in any case."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call."""

    positional: tuple[Item, ...]
    keywords: Mapping[str, Symbol]
    complete: bool = True
    """False if there may be other keywords."""
    unpacked: tuple[Symbol, ...] = ()
    """The dictionaries whose items are other keywords, if these are not known one by one."""

    @staticmethod
    def evaluate(interpreter: FunctionInterpreter, node: ast.Call) -> Arguments:
        """Evaluate the arguments of a call, in their order."""
        positional: list[Item] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                positional += items_of(interpreter.evaluate(argument.value))
            else:
                positional.append(interpreter.evaluate(argument))
        keywords: dict[str, Symbol] = {}
        unpacked: list[Symbol] = []
        for keyword in node.keywords:
            value = interpreter.evaluate(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif (known_keywords := _unpack_keywords(value)) is not None:
                keywords |= known_keywords
            else:
                unpacked.append(value)
        return Arguments(tuple(positional), keywords, not unpacked, tuple(unpacked))

    @property
    def symbols(self) -> list[Symbol] | None:
        """The positional arguments, one by one; None if a list of unknown length is among them."""
        symbols = [item for item in self.positional if not isinstance(item, Spread)]
        return symbols if len(symbols) == len(self.positional) else None

    def get(self, name: str, index: int = 0) -> Symbol | None:
        """Return the argument of a name, which may also be given at an index; None if it is not given."""
        if name in self.keywords:
            return self.keywords[name]
        first_items = self.positional[: index + 1]
        if len(first_items) <= index or any(isinstance(item, Spread) for item in first_items):
            return None
        return first_items[index]  # type: ignore[return-value]

    def all_items(self) -> Sequence[Item]:
        """Return all arguments, whether positional or keywords."""
        return (*self.positional, *self.keywords.values())


def _unpack_keywords(value: Symbol) -> Mapping[str, Symbol] | None:
    """Return the keywords of `**value`; None if they are not known."""
    is_known, dictionary = known_value(value)
    if isinstance(value, Fields) and value.base is None and not value.fields_only:
        return value.items
    if is_known and type(dictionary) is dict and all(type(key) is str for key in dictionary):
        return {key: KnownValue(item) for key, item in dictionary.items()}
    return None


def call_framework_method(interpreter: FunctionInterpreter, func: Any, arguments: Arguments) -> Symbol | None:
    """Return what a method returns that runs an object of the framework; None for any other function.

    Such objects are Runnables, prompts, tools, and pool-backed objects with methods of their own.
    """
    if type(func) is not MethodType or type(func.__func__) is not FunctionType:
        return None
    owner, name = func.__self__, func.__func__.__name__
    if type(owner) in (StructuredTool, Tool) and name in ("invoke", "ainvoke"):
        return _call_tool(interpreter, owner, name, arguments)
    if is_runnable(owner) and name in RUN_METHODS:
        return _call_runnable(interpreter, owner, name, arguments)
    if name in _SPLIT_METHODS and _is_splitter(owner):
        return _split(interpreter, owner, name, arguments)
    kind, rule = _METHOD_RULES.get(name.removeprefix("a"), (None, None))
    if kind is None or rule is None or not is_instance(owner, kind) or not arguments.complete:
        return None
    result = rule(interpreter, owner, name, arguments) if is_framework_code(func.__func__) else None
    if result is None and kind in (VectorStore, Embeddings):
        result = _call_provider(interpreter, func, arguments)
    return AwaitableValue(result) if name.startswith("a") and result is not None else result


# ------------------------------------------------------------ Runnables and tools


def _call_runnable(interpreter: FunctionInterpreter, runnable: Any, method: str, arguments: Arguments) -> Symbol:
    """Interpret `runnable.invoke(input, config, **bound)`, `batch` and so on."""
    keywords = dict(arguments.keywords)
    is_stream = method in ("stream", "astream")
    streamed = is_stream or _may_stream(arguments.get("config", 1))
    first: Item | None = arguments.positional[0] if arguments.positional else None
    if first is None:
        first = keywords.pop("input", keywords.pop("inputs", None))
    for name in ("config", "return_exceptions"):
        keywords.pop(name, None)
    bound = {key: known_value(interpreter.read_setting(value)) for key, value in keywords.items()}
    all_known = arguments.complete and all(is_known for is_known, _ in bound.values())
    if first is None or isinstance(first, Spread) or not all_known:
        interpreter.add_user_code()
        return UNKNOWN_VALUE
    kwargs = {key: value for key, (_, value) in bound.items()}

    def run_one(body: FunctionInterpreter, argument: Symbol) -> Symbol:
        is_async = method.startswith("a")
        if not streamed and not kwargs:
            return _run_parts(body, runnable, argument, is_async)
        return body.run_runnable(runnable, argument, kwargs, streamed=streamed, is_async=is_async)

    if method in ("batch", "abatch"):
        result = map_items(interpreter, first, run_one, one_by_one=False)
    else:
        result = run_one(interpreter, first)
    if is_stream:
        return UNKNOWN_VALUE
    return AwaitableValue(result) if method.startswith("a") else result


def _run_parts(interpreter: FunctionInterpreter, runnable: Any, argument: Symbol, is_async: bool) -> Symbol:
    """Interpret a call of a Runnable: part by part if there is a `RunnableBranch` in it, else as a whole."""
    node = without_names(runnable)
    if not has_branch(node):
        return interpreter.run_runnable(runnable, argument, {}, is_async=is_async)
    if is_instance(node, RunnableBranch):
        return _run_branch(interpreter, node, argument, is_async)
    if is_instance(node, RunnableSequence):
        for step in node.steps:
            argument = _run_parts(interpreter, step, argument, is_async)
        return argument
    assigned = Fields({key: _run_parts(interpreter, step, argument, is_async) for key, step in steps_by_key(node)})
    if is_instance(node, RunnableParallel):
        return assigned
    if not isinstance(argument, Fields) or argument.attributes or argument.fields_only:
        return UNKNOWN_VALUE
    return Fields({**argument.items, **assigned.items}, argument.base)


def _run_branch(interpreter: FunctionInterpreter, branch: Any, argument: Symbol, is_async: bool) -> Symbol:
    """Interpret a `RunnableBranch` as the function with `if` statements that it stands for."""
    run = "await {}.ainvoke(value)" if is_async else "{}.invoke(value)"
    values: dict[str, Symbol] = {"value": argument, "default": KnownValue(branch.default)}
    lines = [f"{'async ' if is_async else ''}def choose():"]
    for number, (condition, arm) in enumerate(branch.branches):
        function = plain_condition(condition)
        values |= {f"arm{number}": KnownValue(arm), f"test{number}": KnownValue(function or condition)}
        test = run.format(f"test{number}") if function is None else f"test{number}(value)"
        lines += [f"    if {test}:", f"        return {run.format(f'arm{number}')}"]
    tree = ast.parse("\n".join([*lines, f"    return {run.format('default')}"]))
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = interpreter.line
    file_name = interpreter.frame.code.co_filename if interpreter.frame.code is not None else "<branch>"
    definition = tree.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    (code,) = (one for one in compile(tree, file_name, "exec").co_consts if isinstance(one, CodeType))
    result = interpreter.call_function(LocalFunction(definition, code, {}, values.__getitem__), (), {})
    if result is None:
        interpreter.add_user_code()
        return UNKNOWN_VALUE
    return result.value if isinstance(result, AwaitableValue) else result


def _may_stream(config: Symbol | None) -> bool:
    """Return True for a config with callbacks of its own, or a list of configs, to which models may stream."""
    if isinstance(config, ItemList):
        return any(_may_stream(item) for item in config.items if not isinstance(item, Spread))
    callbacks: Symbol = KnownValue(None)
    if isinstance(config, Fields):
        callbacks = config.items.get("callbacks", callbacks)
    elif isinstance(config, KnownValue) and type(config.value) is dict:
        callbacks = KnownValue(config.value.get("callbacks"))
    is_known, value = known_value(callbacks)
    return not is_known or (value is not INHERITED_CALLBACKS and streams(handlers_in(value)))


def _call_tool(interpreter: FunctionInterpreter, tool: Any, method: str, arguments: Arguments) -> Symbol:
    """Interpret the function that a tool was made of."""
    func = tool.func if method == "invoke" or tool.coroutine is None else tool.coroutine
    argument = arguments.positional[0] if len(arguments.positional) == 1 else arguments.keywords.get("input")
    result: Symbol | None = None
    if isinstance(argument, Fields) and argument.base is None:
        result = interpreter.call_function(func, (), argument.items)
    elif argument is not None and not isinstance(argument, Spread) and type(tool) is Tool:
        result = interpreter.call_function(func, (argument,), {})
    if result is None:
        interpreter.add_user_code()
        result = UNKNOWN_VALUE
    value = result.value if isinstance(result, AwaitableValue) else result
    return AwaitableValue(value) if method == "ainvoke" else value


# ------------------------------------------------------------ methods of stores, rerankers, embedders and prompts


def _search_store(interpreter: FunctionInterpreter, store: Any, method: str, arguments: Arguments) -> Symbol | None:
    """Interpret `store.similarity_search(query, k, filter=...)` as a call of a retriever of the store."""
    query = arguments.get("query")
    options = {key: arguments.keywords[key] for key in ("k", "filter") if key in arguments.keywords}
    if len(arguments.positional) > 1 and not isinstance(arguments.positional[1], Spread):
        options["k"] = arguments.positional[1]
    option_values = {key: known_value(value) for key, value in options.items()}
    all_known = all(is_known for is_known, _ in option_values.values())
    is_plain_search = method.removeprefix("a") == "similarity_search"
    if query is None or not all_known or not is_plain_search or not is_framework_code(type(store).as_retriever):
        return None
    retriever = store.as_retriever(search_kwargs={"k": 4, **{key: value for key, (_, value) in option_values.items()}})
    return interpreter.run_runnable(retriever, query, {}) if is_pool_backed(retriever) else None


def _rerank(interpreter: FunctionInterpreter, reranker: Any, method: str, arguments: Arguments) -> Symbol | None:
    """Interpret `reranker.compress_documents(documents, query)`; None unless an engine of a pool does the reranking."""
    documents, query = arguments.get("documents"), arguments.get("query", 1)
    if documents is None or query is None or not is_pool_backed(reranker):
        return None
    return interpreter.run_runnable(reranker.as_runnable(), Fields({"query": query, "documents": documents}), {})


def _embed(interpreter: FunctionInterpreter, embedder: Any, method: str, arguments: Arguments) -> Symbol | None:
    """Interpret the embedding of one text as a query, or of several as documents."""
    leaf = leaf_of(embedder, {})
    is_list = method.endswith("documents")
    argument = arguments.get("texts" if is_list else "text")
    if not isinstance(leaf, EmbeddingLeaf) or argument is None:
        return None
    return interpreter.embed(leaf, argument, is_list=is_list)


def _call_provider(interpreter: FunctionInterpreter, func: MethodType, arguments: Arguments) -> Symbol | None:
    """Interpret a call of the user's own vector store or embeddings; None if it is not certain or not prefetched.

    The first argument is what is searched for or embedded; the others have to be known before, and plain data.
    """
    provider, name = func.__self__, func.__func__.__name__
    method, find_leaves = name.removeprefix("a"), interpreter.shared.find_leaves
    is_embedding = method not in SEARCH_METHODS
    parameters = (_EMBEDDED[method],) if is_embedding else (SEARCH_METHODS[method], "k")
    argument, symbols = arguments.get(parameters[0]), arguments.symbols
    if find_leaves is None or argument is None or symbols is None or len(symbols) > len(parameters):
        return None
    options = {**arguments.keywords, **dict(zip(parameters, symbols, strict=False))}
    del options[parameters[0]]
    values = {key: known_value(interpreter.read_setting(symbol)) for key, symbol in options.items()}
    if not all(is_known and holds_plain_data(value) for is_known, value in values.values()) or (
        options and is_embedding
    ):
        return None
    functions = [known_value(read_object_attribute(provider, one))[1] for one in (name, method)]
    if functions[0] != func or not all(_is_method(one, provider) and _takes(one, parameters) for one in functions):
        return None
    runnable, kwargs = provider_method(provider, method), {key: value for key, (_, value) in values.items()}
    location, is_async = f"{interpreter.name}:{interpreter.line}", name != method
    if find_leaves(runnable, location, kwargs, is_async)(runnable, kwargs, location) is None:
        return None
    return interpreter.run_runnable(runnable, argument, kwargs, is_async=is_async)


def _is_method(func: Any, owner: object) -> bool:
    return type(func) is MethodType and func.__self__ is owner


def _takes(func: Any, parameters: Sequence[str]) -> bool:
    """Return True if a method's parameters begin with these, or if it hands all arguments on to one that has them."""
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return names == ["args", "kwargs"] or names[: len(parameters)] == list(parameters)


def _format_prompt(interpreter: FunctionInterpreter, prompt: Any, method: str, arguments: Arguments) -> Symbol | None:
    """Interpret what a prompt template makes of its variables: a text, messages, or a prompt value."""
    if arguments.positional:
        return None
    result = interpreter.run_runnable(prompt, Fields(dict(arguments.keywords)), {})
    converters = {"format": "to_string", "format_messages": "to_messages"}
    converter = converters.get(method.removeprefix("a"), "")
    if not isinstance(result, Prompted) or not converter:
        return result
    render_prompt = result.render

    def render(values: Mapping[str, Any]) -> Any:
        return getattr(render_prompt(values), converter)()

    return Prompted(result.inputs, result.parts, render)


def _describe_format(interpreter: FunctionInterpreter, parser: Any, method: str, arguments: Arguments) -> Symbol | None:
    """Interpret `parser.get_format_instructions()` as a text that the framework makes at run time."""
    models = [part for part in vars(parser).values() if is_instance(part, type)]
    settings = [part for part in vars(parser).values() if not is_instance(part, type)]
    are_known = all(map(writes_itself, models)) and is_plain(settings)
    if arguments.all_items() or not is_framework_code(type(parser)) or not are_known:
        return None
    name = interpreter.draft.name(f"{interpreter.name}.instructions")
    interpreter.shared.helpers.add(name)
    call = mark_fallible(on_loop(lambda: parser.get_format_instructions()))
    return interpreter.draft.add(Component(name, Role.CALL, ()), call)


def _parse(interpreter: FunctionInterpreter, parser: Any, method: str, arguments: Arguments) -> Symbol | None:
    """Interpret `parser.parse(text)` as the parser in a chain is interpreted."""
    text = arguments.get("text")
    if text is None or len(arguments.all_items()) != 1 or not is_framework_code(type(parser)):
        return None
    return interpreter.run_runnable(parser, text, {}, is_async=method.startswith("a"))


_EMBEDDED = {"embed_query": "text", "embed_documents": "texts"}
"""The methods of embeddings, and the name of their parameter."""
_MethodRule = Callable[[FunctionInterpreter, Any, str, Arguments], Symbol | None]
_METHOD_RULES: Mapping[str, tuple[type, _MethodRule]] = {
    **dict.fromkeys(SEARCH_METHODS, (VectorStore, _search_store)),
    "compress_documents": (BaseDocumentCompressor, _rerank),
    "embed_query": (Embeddings, _embed),
    "embed_documents": (Embeddings, _embed),
    "format": (BasePromptTemplate, _format_prompt),
    "format_messages": (BasePromptTemplate, _format_prompt),
    "format_prompt": (BasePromptTemplate, _format_prompt),
    "get_format_instructions": (BaseOutputParser, _describe_format),
    "parse": (BaseOutputParser, _parse),
}

# ------------------------------------------------------------ text splitters


_SPLIT_METHODS = word_set("split_text split_documents create_documents")
_MAX_SPLIT_LENGTH = 200_000
"""Characters of the texts that are split before the original does so: it takes some ten milliseconds."""


def _is_splitter(value: Any) -> bool:
    """Return True for a splitter that measures texts by `len`, and whose methods are those of its class."""
    if not is_splitter_class(type(value)) or not _SPLIT_METHODS.isdisjoint(vars(value)):
        return False
    sizes = splitter_sizes(value)
    return sizes is not None and sizes.length is len


def _split(interpreter: FunctionInterpreter, splitter: Any, method: str, arguments: Arguments) -> Symbol:
    """Interpret a call of a text splitter as a list of chunks that is computed at run time, as the original does."""
    argument = arguments.get({"split_text": "text", "split_documents": "documents"}.get(method, "texts"))
    if argument is None or len(arguments.all_items()) != 1 or not arguments.complete:
        return UNKNOWN_VALUE
    try:
        ref = interpreter.to_ref(argument)
    except NotUnderstood:
        return UNKNOWN_VALUE

    def chunks(value: Any) -> Any:
        """Return the chunks of texts and documents of the framework. Raise `UnfitValue` for other or long ones."""
        documents = value if type(value) is list else [value]
        texts = [one.page_content if type(one) is Document else one for one in documents]
        are_plain = all(type(one) is str or is_plain(one.metadata) for one in documents)
        if not are_plain or not all(type(text) is str for text in texts) or sum(map(len, texts)) > _MAX_SPLIT_LENGTH:
            raise UnfitValue("only texts and documents of limited length are split before their place")
        return getattr(splitter, method)(value)

    name = interpreter.draft.name(f"{interpreter.name}.chunks")
    interpreter.shared.helpers.add(name)
    return interpreter.draft.call(name, mark_fallible(chunks), (), value=ref)


# ------------------------------------------------------------ objects that the framework makes


def pipe(left: Symbol, right: Symbol) -> Symbol | None:
    """Return `left | right` of existing Runnables; None if neither is one."""
    left_known, left_value = known_value(left)
    right_known, right_value = known_value(right)
    operators = [
        read_object_attribute(value, name)
        for value, name in ((left_value, "__or__"), (right_value, "__ror__"))
        if is_runnable(value)
    ]
    if not operators:
        return None
    is_framework_pipe = all(isinstance(one, KnownValue) and is_framework_code(one.value) for one in operators)
    if not (left_known and right_known and is_safe(left_value) and is_safe(right_value) and is_framework_pipe):
        return UNKNOWN_VALUE
    return try_build(lambda: left_value | right_value)
