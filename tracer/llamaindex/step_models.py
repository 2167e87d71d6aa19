"""The LLMs, prompts and messages of a workflow's steps: the calls that steps make, and what they read of the answers.

A call is one component, which makes the provider call that LlamaIndex's own code comes to. That code also reads a
structured answer, once there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.memory import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.response_synthesizers import BaseSynthesizer, get_response_synthesizer
from pydantic import BaseModel

from teola_plugin.graph import Attributes, Component, Ref, Role, UnfitValue, on_loop
from teola_plugin.shims.llamaindex.copies import clone
from teola_plugin.shims.llamaindex.interceptors import PUBLIC_METHODS, STREAMING_METHODS, STRUCTURED_METHODS, is_openai
from teola_plugin.shims.llamaindex.silent_calls import (
    ProviderArguments,
    has_own_structured_code,
    provider_call_of,
    replay,
    run_silently,
)
from teola_plugin.shims.pydantic import is_model_class
from teola_plugin.tracer.draft import DERIVED, mark_fallible
from teola_plugin.tracer.functions import UNKNOWN_VALUE, Instance, ItemList, KnownValue, Spread, Symbol
from teola_plugin.tracer.functions.calls import call_model_class
from teola_plugin.tracer.functions.framework_calls import Arguments
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import is_framework_code, is_instance, is_subclass
from teola_plugin.tracer.functions.symbols import (
    AwaitableValue,
    DataObject,
    is_constant,
    known_value,
    word_set,
)
from teola_plugin.tracer.leaf import PERMISSION
from teola_plugin.tracer.llamaindex.classes import copy_prompt
from teola_plugin.tracer.llamaindex.lowering import AttributeGuard, Guard
from teola_plugin.tracer.llamaindex.model_calls import PROVIDER, OwnModels
from teola_plugin.tracer.llamaindex.step_data import Rule
from teola_plugin.tracer.purity.data_classes import data_class_of, is_data
from teola_plugin.tracer.symbols import NotUnderstood

TEXT = "str()"
"""Key of what `str` makes of an answer."""
_RAW = "raw"
"""Key of the object that a structured answer is."""
_WHOLE_ANSWERS = ("complete", "chat", "predict")
_STRUCTURED_PREDICT = "structured_predict"
LLM_METHODS = frozenset((*PUBLIC_METHODS, *STREAMING_METHODS, *STRUCTURED_METHODS, "predict", "apredict", "stream"))
"""Methods of an LLM that call its provider. Those that are not understood keep their place, and change nothing."""
_SERIALIZERS = ("field_serializers", "model_serializers", "computed_fields")
_SCHEMA_METHODS = ("model_json_schema", "__get_pydantic_json_schema__", "__get_pydantic_core_schema__")


class Answer:
    """Stands for what a model or an engine answers. Code may read its fields; the graph cannot make such an object."""

    def __init__(self, **fields: Any) -> None:
        raise UnfitValue("the graph has no more of an answer than its text and its nodes")


class _CreatedPart(Answer):
    """Stands for a synthesizer or a postprocessor that a step creates."""


_PARTS: tuple[tuple[type, frozenset[str]], ...] = (
    (BaseSynthesizer, word_set("synthesize asynthesize get_response aget_response")),
    (BaseNodePostprocessor, word_set("postprocess_nodes apostprocess_nodes")),
    (
        BaseMemory,
        word_set("put aput put_messages aput_messages get aget get_all aget_all set aset reset areset"),
    ),
)
"""Classes of LlamaIndex's parts, and their methods that change nothing which a model or a search reads: they keep their
place, and nothing is known of what they return."""


@dataclass(frozen=True, slots=True)
class UnreadCall:
    """A call in a step that is not read: it keeps its place."""

    class_name: str = ""
    """The class of the workflow, model or engine that is called; empty if the step waits for an event."""
    method: str = ""
    """The method of a model or an engine. Empty for a run of a workflow, behind which nothing is known."""
    step: str = ""


@dataclass(frozen=True, slots=True)
class _CallArguments:
    """The arguments of a call of an LLM."""

    positional: int
    """How many of them have no name: `argument0`, `argument1` and so on."""
    constants: Mapping[str, Any]
    """Templates and classes, by name."""
    refs: Mapping[str, Ref]
    """All others."""

    @staticmethod
    def read(interpreter: FunctionInterpreter, arguments: Arguments) -> _CallArguments:
        """Return the arguments of a call. Raises `NotUnderstood` if they are not all known."""
        symbols = arguments.symbols if arguments.complete else None
        if symbols is None:
            raise NotUnderstood("arguments that are not known one by one")
        constants, refs = dict[str, Any](), dict[str, Ref]()
        for key, symbol in (*((f"argument{i}", one) for i, one in enumerate(symbols)), *arguments.keywords.items()):
            is_known, value = known_value(symbol)
            if is_known and is_instance(value, BasePromptTemplate):
                constants[key] = _copy_template(value)
            elif is_known and is_model_class(value):
                constants[key] = value
            else:
                refs[key] = interpreter.to_call_input(symbol)
        return _CallArguments(len(symbols), constants, refs)

    def call(self, method: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call a method with these arguments. `values`: those of the refs, by name."""
        if any(is_instance(one, BasePromptTemplate) for one in self.constants.values()):
            _require_data(values)
        keywords = {**self.constants, **values}
        positional = [keywords.pop(f"argument{i}") for i in range(self.positional)]
        return method(*positional, **keywords)


@dataclass(slots=True)
class ModelRules:
    """The rules for the LLMs that steps call, for their prompts and messages."""

    own_models: OwnModels
    guards: list[Guard] = field(default_factory=list)
    unread_calls: dict[str, UnreadCall] = field(default_factory=dict)
    """Calls that are not read, by `file:line`."""

    def note_unread(self, interpreter: FunctionInterpreter, call: UnreadCall) -> None:
        """Note that the call in the line that is interpreted now is not read."""
        if interpreter.frame.code is not None:
            source = f"{interpreter.frame.code.co_filename}:{interpreter.line}"
            self.unread_calls[source] = replace(call, step=interpreter.name)

    def find(self, owner: Symbol, name: str) -> Rule | None:
        """Return the rule for a method of an LLM, of a prompt or of an answer, or for creating one."""
        if isinstance(owner, Instance) and name == "__str__" and owner.kind is Answer:
            return lambda interpreter, arguments: owner.fields.get(TEXT, UNKNOWN_VALUE)
        if isinstance(owner, DataObject) and name in ("model_dump", "model_dump_json", "model_copy"):
            return _ignore if is_framework_code(getattr(owner.kind, name, None)) else None
        if isinstance(owner, Instance) and owner.kind is _CreatedPart:
            return _rule_of_part(name) if any(name in methods for _, methods in _PARTS) else None
        if not isinstance(owner, KnownValue):
            return None
        target = owner.value
        if is_instance(target, type):
            return self._rule_of_class(target, name)
        if target is get_response_synthesizer and name == "__call__":
            return _create_part
        if any(is_instance(target, kind) and name in methods for kind, methods in _PARTS):
            return _rule_of_part(name) if _is_part_of_framework(target) else None
        if is_instance(target, LLM):
            if name == "as_structured_llm" and not has_own_structured_code(target):
                return partial(self._structured_llm, target)
            return partial(self._call_llm, target, name) if name in LLM_METHODS else None
        if is_instance(target, BasePromptTemplate) and name in ("format", "format_messages", "partial_format"):
            return partial(_format_prompt, target, name)
        return None

    def _rule_of_class(self, kind: Any, name: str) -> Rule | None:
        """Return the rule for creating an LLM, a prompt or a message by calling a class, or a method of it."""
        if kind is ChatMessage:
            return {"__call__": partial(_make_message, "content"), "from_str": partial(_make_message, "role")}.get(name)
        if (kind in _TEMPLATES and name == "__call__") or (kind is ChatPromptTemplate and name == "from_messages"):
            return partial(_make_template, kind if name == "__call__" else kind.from_messages)
        if name == "__call__" and is_subclass(kind, BaseSynthesizer, BaseNodePostprocessor) and is_framework_code(kind):
            return _create_part
        return partial(self._create_llm, kind) if is_subclass(kind, LLM) and name == "__call__" else None

    def _create_llm(self, kind: Any, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret the creation of an LLM: an OpenAI client of plain settings is known, any other is user code."""
        llm = call_model_class(interpreter, kind, arguments, is_plain=is_openai(kind))
        if isinstance(llm, KnownValue):
            self.own_models.add_created(llm.value)
        return llm

    def _structured_llm(self, llm: Any, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret `llm.as_structured_llm(output_cls)`, which keeps the LLM itself."""
        is_known, kind = known_value(arguments.get("output_cls") or UNKNOWN_VALUE)
        if not is_known or not is_model_class(kind) or len(arguments.all_items()) > 1 or not arguments.complete:
            return UNKNOWN_VALUE
        return KnownValue(StructuredLLM(llm=llm, output_cls=kind))

    # ------------------------------------------------------------ calls

    def _call_llm(self, llm: Any, name: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Interpret a step's call of an LLM, if it is understood, as a component that makes the same provider call."""
        is_async, method = name.startswith("a"), name.removeprefix("a")
        try:
            if type(llm) is StructuredLLM and method in ("complete", "chat"):
                result = self._call_structured_llm(llm, name, interpreter, arguments)
            elif method == _STRUCTURED_PREDICT:
                result = self._predict_object(llm, name, interpreter, arguments)
            elif method in _WHOLE_ANSWERS and not interpreter.has_changed(llm):
                result = self._call_for_text(llm, name, interpreter, arguments)
            else:
                raise NotUnderstood("a call in a form that is not prefetched")
        except NotUnderstood:
            self.note_unread(interpreter, UnreadCall(type(llm).__name__, name))
            return UNKNOWN_VALUE
        return AwaitableValue(result) if is_async else result

    def _call_for_text(self, llm: Any, name: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Return what a call returns that answers with a text. Raises `NotUnderstood`."""
        is_async, method = name.startswith("a"), name.removeprefix("a")
        self.own_models.require_llm(llm)
        call_arguments = _CallArguments.read(interpreter, arguments)

        def provider_arguments(values: Mapping[str, Any]) -> ProviderArguments:
            return provider_call_of(
                llm, lambda one: call_arguments.call(getattr(one, method), values), is_async=is_async
            )

        text = self._add_call(interpreter, llm, method, call_arguments, provider_arguments, is_async=is_async)
        if method == "complete":
            return Instance(Answer, {"text": text, TEXT: text})
        if method == "predict":
            return text
        content = compute(interpreter, "content", on_loop(text_if_any), {"text": text})
        return Instance(Answer, {"message": Instance(Answer, {"content": content})})

    def _add_call(
        self,
        interpreter: FunctionInterpreter,
        llm: Any,
        method: str,
        arguments: _CallArguments,
        provider_arguments: Callable[[Mapping[str, Any]], ProviderArguments],
        *,
        is_async: bool,
    ) -> Ref:
        """Add the component of a call of an LLM. Return the ref of the answer's text."""
        draft = interpreter.draft
        key = draft.name(f"{interpreter.name}.{method}", *DERIVED)
        self.own_models.add_site(key, llm, runs_in_loop=is_async)
        component = Component(
            key,
            Role.GENERATION,
            tuple(arguments.refs.items()),
            PROVIDER,
            effects=(PERMISSION,),
            attributes=Attributes(wrapped=key),
        )
        text = draft.add(component, lambda values: self.own_models.request(key, provider_arguments(values)))
        interpreter.append_span(draft.span((key,)))
        return text

    # ------------------------------------------------------------ structured answers

    def _predict_object(self, llm: Any, name: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
        """Return the object that `structured_predict` returns. Raises `NotUnderstood`."""
        is_known, kind = known_value(arguments.get("output_cls") or UNKNOWN_VALUE)
        third_argument = arguments.get("llm_kwargs", 2)
        if not is_known or third_argument is not None:  # LlamaIndex writes into `llm_kwargs`
            raise NotUnderstood("the class of the answer, or what the LLM is called with, is not known")
        answer = self._call_for_object(llm, llm, kind, name, interpreter, arguments, lambda answer: {_RAW: answer})
        return UNKNOWN_VALUE if answer is None else _object_of(kind, answer)

    def _call_structured_llm(
        self, llm: StructuredLLM, name: str, interpreter: FunctionInterpreter, arguments: Arguments
    ) -> Symbol:
        """Return the answer of an LLM that `as_structured_llm` has made. Raises `NotUnderstood`."""
        kind, inner = llm.output_cls, llm.llm
        self.guards += [AttributeGuard(llm, "llm", inner), AttributeGuard(llm, "output_cls", kind)]
        is_chat = name.endswith("chat")
        if len(arguments.all_items()) != 1:  # LlamaIndex writes into the others
            raise NotUnderstood("the arguments of the LLM are not known")

        def read(response: Any) -> Mapping[str, Any]:
            return {_RAW: response.raw, TEXT: response.message.content if is_chat else response.text}

        answer = self._call_for_object(llm, inner, kind, name, interpreter, arguments, read)
        if answer is None:
            return UNKNOWN_VALUE
        raw, text = _object_of(kind, answer), answer.at(TEXT)
        if is_chat:
            return Instance(Answer, {"raw": raw, "message": Instance(Answer, {"content": text})})
        return Instance(Answer, {"raw": raw, "text": text, TEXT: text})

    def _call_for_object(
        self,
        owner: Any,
        llm: Any,
        kind: Any,
        name: str,
        interpreter: FunctionInterpreter,
        arguments: Arguments,
        read: Callable[[Any], Mapping[str, Any]],
    ) -> Ref | None:
        """Add a call that answers with an object of a class. Raises `NotUnderstood`.

        Return the ref of a dictionary with what `read` makes of the answer, the object as a dictionary of its fields;
        None if the class decides how the object is made or written.

        Args:
            owner: The object whose method is called.
            llm: The LLM that it calls: `owner` itself, or the one inside it.
            kind: The class of the object.
            name: The name of the method.
            interpreter: Interprets the step.
            arguments: Those of the call.
            read: Returns what steps read of the answer, by key.
        """
        is_async, method = name.startswith("a"), name.removeprefix("a")
        if interpreter.has_changed(owner) or interpreter.has_changed(llm):
            raise NotUnderstood("an LLM that has changed")
        if has_own_structured_code(llm) or not is_model_class(kind) or _has_own_schema_code(kind):
            raise NotUnderstood("code of the user's own asks for the answer's fields")
        self.own_models.require_llm(llm)
        call_arguments = _CallArguments.read(interpreter, arguments)

        def run(one: Any, name: str, values: Mapping[str, Any]) -> Any:
            """Call the method of a copy whose LLM is `one`."""
            target = one if owner is llm else clone(owner, llm=one)
            return run_silently(lambda: call_arguments.call(getattr(target, name), values))

        def provider_arguments(values: Mapping[str, Any]) -> ProviderArguments:
            return provider_call_of(llm, lambda one: run(one, name, values), is_async=is_async)

        text = self._add_call(interpreter, llm, method, call_arguments, provider_arguments, is_async=is_async)
        decorators = kind.__pydantic_decorators__
        if data_class_of(kind) is None or any(getattr(decorators, one) for one in _SERIALIZERS):
            return None

        def parsed(answer: str, **values: Any) -> dict[str, Any]:
            """Return what LlamaIndex's code makes of the LLM's answer."""
            result = dict(read(replay(llm, lambda one: run(one, method, values), [answer])))
            if type(result[_RAW]) is not kind:
                raise UnfitValue(f"the answer is no {kind.__name__}")
            return {**result, _RAW: dict(vars(result[_RAW]))}

        return compute(interpreter, "object", mark_fallible(parsed), {"answer": text, **call_arguments.refs})


def _object_of(kind: Any, answer: Ref) -> Symbol:
    """Return the object of a structured answer. Fields that a function may have filled in are unknown."""
    data_class = data_class_of(kind)
    assert data_class is not None
    fields: dict[str, Symbol] = {
        name: answer.at(_RAW, name) if one.factory in (None, list, dict) else UNKNOWN_VALUE
        for name, one in data_class.fields.items()
    }
    return DataObject(kind, fields)


def _has_own_schema_code(kind: Any) -> bool:
    """Return True if functions of the user's own have a part in the JSON schema of a class."""
    own_methods = (getattr(getattr(kind, name), "__func__", None) for name in _SCHEMA_METHODS)
    base_methods = (getattr(getattr(BaseModel, name), "__func__", None) for name in _SCHEMA_METHODS)
    field_extras = [one.json_schema_extra for one in kind.model_fields.values()]
    has_own_extras = any(map(callable, (kind.model_config.get("json_schema_extra"), *field_extras)))
    return has_own_extras or list(own_methods) != list(base_methods)


# ------------------------------------------------------------ messages


def _make_message(second: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Interpret `ChatMessage(content, ...)`, or `ChatMessage.from_str(content, role)` where `second` is `role`.

    Unknown for arguments that are not known by name.
    """
    symbols = arguments.symbols if arguments.complete else None
    names = dict.fromkeys(("content", second))
    if symbols is None or len(symbols) > len(names):
        return UNKNOWN_VALUE
    fields = {**dict(zip(names, symbols, strict=False)), **arguments.keywords}
    is_known, role = known_value(fields.get("role", UNKNOWN_VALUE))
    if is_known and type(role) is MessageRole:
        fields["role"] = KnownValue(role.value)
    return Instance(ChatMessage, fields)


def _known_data(symbol: Symbol) -> Any:
    """Return a value made of constants and messages. Raises `NotUnderstood` for any other."""
    if isinstance(symbol, Instance) and symbol.kind is ChatMessage:
        return ChatMessage(**{name: _known_data(value) for name, value in symbol.fields.items()})
    if isinstance(symbol, ItemList) and not any(isinstance(item, Spread) for item in symbol.items):
        return symbol.kind(_known_data(item) for item in symbol.items if not isinstance(item, Spread))
    is_known, value = known_value(symbol)
    if not is_known or not (is_constant(value) or type(value) is ChatMessage):
        raise NotUnderstood("it is no constant")
    return value


# ------------------------------------------------------------ prompts

_TEMPLATES = (PromptTemplate, ChatPromptTemplate, RichPromptTemplate)
_JINJA_CODE = re.compile(r"\{([{%])[-+]?(.*?)[-+]?[%}]\}", re.DOTALL)
_JINJA_STATEMENTS = word_set("chat endchat if elif else endif for endfor set endset")
_JINJA_FILTERS = word_set(
    "capitalize default first int join last length list lower replace round title tojson trim upper"
)


def _is_pure_jinja(template: str) -> bool:
    """Return True if a Jinja template only writes values, and reads no file, asks no model and guesses nothing."""
    for mark, code in _JINJA_CODE.findall(template):
        called_names = set(re.findall(r"\|\s*(\w+)", code)) | set(re.findall(r"(\w+)\s*\(", code))
        if (mark == "%" and code.split()[:1] and code.split()[0] not in _JINJA_STATEMENTS) or not (
            called_names <= _JINJA_FILTERS
        ):
            return False
    return True


def _copy_template(template: Any) -> Any:
    """Return a copy of a template that may be formatted. Raises `NotUnderstood` if that runs code of the user's."""
    if type(template) not in _TEMPLATES:
        raise NotUnderstood(f"{type(template).__name__} is not known to be pure")
    if type(template) is RichPromptTemplate and not _is_pure_jinja(template.template_str):
        raise NotUnderstood("a template that may do more than write its values")
    return copy_prompt(template)


def _require_data(values: Mapping[str, Any]) -> None:
    """Raise `UnfitValue` unless the values of a template's variables are data: writing others may run user code."""
    if not all(map(_is_data, values.values())):
        raise UnfitValue("a value of a template is an object")


def _is_data(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_data, value))
    return is_data(value) or is_framework_code(type(value))


def _make_template(create: Callable[..., Any], interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Interpret the creation of a template from constants and messages; unknown for any others."""
    symbols = arguments.symbols if arguments.complete else None
    if symbols is None:
        return UNKNOWN_VALUE
    try:
        keywords = {name: _known_data(value) for name, value in arguments.keywords.items()}
        return KnownValue(create(*map(_known_data, symbols), **keywords))
    except Exception:  # it is not known, or the original raises as well
        return UNKNOWN_VALUE


def _format_prompt(template: Any, method: str, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Interpret `template.format(...)`, and the like, as what the framework makes once the variables are known."""
    if arguments.positional or not arguments.complete or interpreter.has_changed(template):
        return UNKNOWN_VALUE
    try:
        prompt = _copy_template(template)
        if method == "partial_format":
            return KnownValue(prompt.partial_format(**{k: _known_data(v) for k, v in arguments.keywords.items()}))
        refs = {key: interpreter.to_ref(symbol) for key, symbol in arguments.keywords.items()}
    except NotUnderstood:
        return UNKNOWN_VALUE

    def formatted(**values: Any) -> Any:
        """Return the text or the messages."""
        _require_data(values)
        return getattr(prompt, method)(**values)

    return compute(interpreter, "prompt", formatted, refs)


# ------------------------------------------------------------ synthesizers, postprocessors, memories


def _is_part_of_framework(part: Any) -> bool:
    """Return True for an object of one of LlamaIndex's classes, without methods or a chat store of the user's."""
    attributes = getattr(part, "__dict__", {})
    store = attributes.get("chat_store")
    is_unchanged = not any(name in attributes for _, methods in _PARTS for name in methods)
    return is_unchanged and is_framework_code(type(part)) and (store is None or is_framework_code(type(store)))


def _rule_of_part(method: str) -> Rule:
    return partial(_call_part, 0 if method.endswith("postprocess_nodes") else 1)


def _create_part(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    return Instance(_CreatedPart, {})


def _call_part(index: int, interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Interpret a call that is not read. It may change its nodes, such as their scores.

    `index`: where the nodes are among the arguments, unless they have a name.
    """
    interpreter.mutations.add(arguments.get("nodes", index) or UNKNOWN_VALUE)
    return UNKNOWN_VALUE


# ------------------------------------------------------------ values that are computed


def _ignore(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    return UNKNOWN_VALUE


def text_if_any(text: str) -> str:
    """Return the text of an answer. Raise `UnfitValue` for an empty one, which may have been none."""
    if not text:
        raise UnfitValue("an answer without text")
    return text


def compute(interpreter: FunctionInterpreter, word: str, call: Callable[..., Any], refs: Mapping[str, Ref]) -> Ref:
    """Add a value that is computed by the framework's own pure code."""
    name = interpreter.draft.name(f"{interpreter.name}.{word}")
    interpreter.shared.helpers.add(name)
    return interpreter.draft.call(name, call, (), **refs)
