"""Calls of LangGraph's own in the functions of a graph: tasks, and settings with the models that these choose.

Settings are the config of a call, and its context.

All nodes of a call see the same settings. A plan has those as they come in its input; where a model is made of them,
there is a plan for each of their values.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from langchain_core.runnables.config import CONFIG_KEYS, ensure_config
from langgraph.config import get_config
from langgraph.runtime import get_runtime

from teola_plugin.graph import INPUT, Ref, UnfitValue
from teola_plugin.shims.langchain import configured, setting_names
from teola_plugin.shims.langgraph import configurable_of, context_of, task_of
from teola_plugin.tracer.functions import UNKNOWN_VALUE, Fields, FunctionInterpreter, KnownValue, Symbol
from teola_plugin.tracer.functions.bodies import uncaptured_items
from teola_plugin.tracer.functions.calls import call_user_function
from teola_plugin.tracer.functions.created_objects import is_runnable, is_safe, opens_no_connection
from teola_plugin.tracer.functions.frames import MethodRule, to_plain_function, unwrap_partial
from teola_plugin.tracer.functions.framework_calls import INHERITED_CALLBACKS, Arguments, call_framework_method
from teola_plugin.tracer.functions.lookup import are_model_variables_reliable, read_object_attribute
from teola_plugin.tracer.functions.pure_expressions import (
    CONFIG,
    CONTEXT,
    ENVIRONMENT,
    NAME_PREFIX,
    read_field,
    read_setting,
)
from teola_plugin.tracer.functions.symbols import RUN_METHODS, AwaitableValue, Expression, known_value
from teola_plugin.tracer.report import TraceNode

_CONFIGURABLE = Ref(INPUT).at(CONFIG).at("configurable")
NODE_CONFIG = Fields(
    {
        **dict.fromkeys(CONFIG_KEYS, UNKNOWN_VALUE),
        "callbacks": KnownValue(INHERITED_CALLBACKS),
        "configurable": _CONFIGURABLE,
    }
)
"""The config that a node is called with."""
NODE_RUNTIME = Fields({"context": Fields({}, Ref(INPUT).at(CONTEXT), attributes=True)}, attributes=True)


NODE_ENVIRONMENT = Ref(INPUT).at(ENVIRONMENT)
_KEYS_OF_LANGGRAPH = "__pregel_"
"""Stands for LangGraph's own keys in the `configurable` of a node: it is never empty."""


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a task's config, as keys of a template's input."""
    context = context_of(config)
    values = context if type(context) is dict else {}
    for name in _field_names(context):
        try:
            values[name] = read_field(context, name)
        except UnfitValue:
            continue
    configurable = {**configurable_of(config), _KEYS_OF_LANGGRAPH: None}
    return {CONFIG: {"configurable": configurable}, CONTEXT: values}


def current_environment() -> dict[str, Any]:
    """Return the environment variables as they are now, as a key of a template's input."""
    return {ENVIRONMENT: dict(os.environ)}


def _field_names(context: Any) -> list[str]:
    """Return the names of the fields of a context that is an object; none for a dictionary."""
    if type(context) is dict:
        return []
    return (
        [field.name for field in fields(context)] if is_dataclass(context) else list(getattr(context, "__dict__", ()))
    )


CALLED_TASK = "its source is read where it is called"
"""The reason in the report's row of a task that a function calls."""


def find_rule(owner: Symbol, name: str, *, has_settings: bool, reads_tasks: bool) -> MethodRule | None:
    """Return the rule of a call of a task, of a method that reads settings, or of one that runs a model they choose.

    Return None for any other method or function.

    Args:
        owner: The object of the method, or the function that is called.
        name: The method's name; `__call__` for a function.
        has_settings: The template's input has the settings of the code that makes the call.
        reads_tasks: Tasks run where they are called: none of their results come from a cache.
    """
    if name == "result" and isinstance(owner, AwaitableValue):
        result = owner.value
        return lambda interpreter, arguments: result
    if not isinstance(owner, KnownValue):
        return None
    if name == "__call__" and reads_tasks and (task := task_of(owner.value)) is not None and not task.is_cached:
        return partial(_call_task, func=task.func, has_settings=has_settings)
    return _find_setting(owner, name) if has_settings else None


def _call_task(interpreter: FunctionInterpreter, arguments: Arguments, *, func: Any, has_settings: bool) -> Symbol:
    """Interpret a call of a task as one of its function, where the task is called.

    The task may run at the same time as what comes after it, which can only make its results later. LangGraph gives it
    some arguments itself, as it does to a node.
    """
    interpreter.draft.nodes.append(TraceNode(f"graph.{interpreter.name}", "task", "lowered", reason=CALLED_TASK))
    plain_function, _ = to_plain_function(unwrap_partial(func, (), {})[0], ())
    code = None if plain_function is None else plain_function.__code__
    parameters = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    settings = {"config": NODE_CONFIG, "runtime": NODE_RUNTIME} if has_settings and not interpreter.is_body else {}
    injected = {name: settings.get(name, UNKNOWN_VALUE) for name in _INJECTED if name in parameters}
    arguments = replace(arguments, keywords={**injected, **arguments.keywords})
    result = call_user_function(interpreter, KnownValue(func), func, arguments)
    return result if isinstance(result, AwaitableValue) else AwaitableValue(result)


_INJECTED = ("config", "previous", "runtime", "store", "writer")
"""Names of the parameters that LangGraph fills."""


def _find_setting(owner: KnownValue, name: str) -> MethodRule | None:
    """Return the rule of a method that reads settings, or runs a model that they choose; None for any other method."""
    value = owner.value
    if name == "__call__":
        return next((rule for function, rule in _FUNCTION_RULES if value is function), None)
    if not is_runnable(value) or setting_names(value) == ():
        return None
    if name in RUN_METHODS:
        return partial(_run_configured, runnable=value, method=name)
    return partial(_prepare_model, model=value, method=name) if name in _MODEL_METHODS else None


# ------------------------------------------------------------ functions that return settings


def _get_config(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    return UNKNOWN_VALUE if interpreter.is_body else NODE_CONFIG


def _get_runtime(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    return UNKNOWN_VALUE if interpreter.is_body else NODE_RUNTIME


def _ensure_config(interpreter: FunctionInterpreter, arguments: Arguments) -> Symbol:
    """Interpret `ensure_config(config)`: the node's config if none is given, a whole config as it is, else unknown."""
    config = arguments.get("config")
    if config is None or (isinstance(config, KnownValue) and config.value is None):
        return _get_config(interpreter, arguments)
    return config if isinstance(config, Fields) and config.items.keys() >= NODE_CONFIG.items.keys() else UNKNOWN_VALUE


_FUNCTION_RULES: tuple[tuple[Any, MethodRule], ...] = (
    (get_config, _get_config),
    (get_runtime, _get_runtime),
    (ensure_config, _ensure_config),
)

# ------------------------------------------------------------ models that settings choose

_MODEL_METHODS = ("bind_tools", "with_structured_output")
"""Methods of models that a model without settings remembers, and calls once it has them."""


def _prepare_model(interpreter: FunctionInterpreter, arguments: Arguments, *, model: Any, method: str) -> Symbol:
    """Interpret `model.bind_tools(...)` and the like."""
    known_arguments = [known_value(argument) for argument in arguments.symbols or ()]
    keywords = {key: known_value(interpreter.read_setting(value)) for key, value in arguments.keywords.items()}
    are_safe = all(is_known and is_safe(value) for is_known, value in (*known_arguments, *keywords.values()))
    if arguments.symbols is None or not arguments.complete or not are_safe:
        return UNKNOWN_VALUE
    prepare = getattr(model, method)
    return KnownValue(prepare(*(value for _, value in known_arguments), **{k: v for k, (_, v) in keywords.items()}))


def _run_configured(interpreter: FunctionInterpreter, arguments: Arguments, *, runnable: Any, method: str) -> Symbol:
    """Interpret a call of a Runnable with the model in it that the settings choose."""
    settings = _settings_for(interpreter, setting_names(runnable), arguments.get("config", 1))
    if settings is not None and are_model_variables_reliable():
        try:
            runnable = configured(runnable, settings, opens_no_connection)
        except Exception:  # the original will tell, or nobody knows which model it is
            pass
    bound_method = read_object_attribute(runnable, method)
    result = call_framework_method(interpreter, known_value(bound_method)[1], arguments)
    if result is None:
        interpreter.add_user_code()
    return UNKNOWN_VALUE if result is None else result


def _settings_for(
    interpreter: FunctionInterpreter, names: tuple[str, ...] | None, config: Any
) -> Mapping[str, Any] | None:
    """Return the values of these settings, without those that are not set; None if one of them is not known."""
    explicit: Mapping[str, Symbol] = {}
    if isinstance(config, Fields):
        configurable = uncaptured_items(config).get("configurable", _CONFIGURABLE)
    else:
        is_known, value = known_value(KnownValue(None) if config is None else config)
        configurable = KnownValue((value or {}).get("configurable", {})) if is_known else UNKNOWN_VALUE
    if isinstance(configurable, Fields) and configurable.base is None:
        explicit = uncaptured_items(configurable)
    elif isinstance(configurable, KnownValue):
        explicit = {key: KnownValue(value) for key, value in configurable.value.items()}
    elif configurable != _CONFIGURABLE:
        return None
    settings: dict[str, Any] = {}
    for name in names or ():
        symbol = explicit.get(name)
        is_set, value = known_value(_read(interpreter, name) if symbol is None else interpreter.read_setting(symbol))
        if not is_set:
            return None
        if symbol is not None:
            settings[name] = value
        elif value[0]:
            settings[name] = value[1]
    return None if names is None else settings


def _read(interpreter: FunctionInterpreter, name: str) -> Symbol:
    """Return whether a setting is there, and its value, if both are known."""
    configurable = f"{NAME_PREFIX}v"
    code = ast.parse(f"({name!r} in {configurable}, {configurable}.get({name!r}))", mode="eval").body
    return read_setting(Expression(code, {configurable: _CONFIGURABLE}), interpreter.shared.decide)
