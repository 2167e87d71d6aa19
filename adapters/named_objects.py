"""Objects of the user that the command line or a server's settings name: `module:object`, `langgraph.json:graph`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from teola_plugin.errors import RegistrationError, unknown_name


@dataclass(frozen=True, slots=True)
class Target:
    """The object that the user named."""

    plain: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `accelerate`."""
    fast: Any = None
    """The named object itself if it is accelerated already; `plain` is its original then."""


def load(name: str, pool: Any = None) -> Target:
    """Import `module:object`, also from the current folder, or the graph that `langgraph.json:graph` names.

    A factory is called without arguments, or with the `pool` if there is one and it takes one. A pair is an object and
    the arguments of `accelerate`. Raise `RegistrationError` for anything else.
    """
    if graph_name := _GRAPH_NAME.fullmatch(name):
        target = LangGraphFile.read(graph_name[1]).load(graph_name[2], pool)
    else:
        target = object_named(name)
        if _is_factory(target):
            target = made_by(target, name, {} if pool is None or not _takes_pool(target) else {"pool": pool})
    arguments: Any = {}
    if isinstance(target, tuple):
        if len(target) != 2 or not isinstance(target[1], Mapping):
            raise RegistrationError(
                f"{name} is a tuple that is no pair of an object and the arguments of accelerate().",
                hint='e.g. return chain, {"pool": pool, "bind": [(model, "llm")]}',
            )
        target, arguments = target
    if not getattr(type(target), "__teola_accelerated__", False):
        return Target(target, arguments)
    if arguments:
        raise RegistrationError(
            f"{name} is accelerated already, and comes with arguments for accelerate().", hint="give one of both"
        )
    return Target(target.__teola_of__()[0], {}, target)


def _is_factory(obj: Any) -> bool:
    """Return True for a function or a class, and False for a callable object of a framework."""
    has_entry_point = any(hasattr(obj, name) for name in ("invoke", "query", "retrieve", "run", "chat"))
    return isinstance(obj, type) or (callable(obj) and not has_entry_point)


def _takes_pool(factory: Any) -> bool:
    """Return True if a factory has a parameter `pool`, so that it is called with the pool of the command or server.

    False also for a callable whose signature Python cannot tell.
    """
    try:
        return "pool" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # built in
        return False


def made_by(factory: Any, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Call a factory of the user. Raise `RegistrationError` if it raises."""
    try:
        return factory(**(arguments or {}))
    except Exception as error:
        arguments_text = ", ".join(f"{key}=..." for key in arguments or {})
        raise RegistrationError(
            f"the factory {name} raised {_described(error)}",
            hint=f"it is called as {name.partition(':')[2]}({arguments_text}); run it by itself",
        ) from error


def object_named(name: str) -> Any:
    """Import the object that `module:object` names. Raise `RegistrationError` if there is none."""
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise RegistrationError(f"{name!r} is not of the form module:object.", hint="e.g. my_app.chains:rag")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        obj: Any = importlib.import_module(module_name)
    except Exception as error:
        raise RegistrationError(
            f"importing {module_name} raised {_described(error)}",
            hint=f"python -c 'import {module_name}' in {folder} must work",
        ) from error
    for part in path.split("."):
        if not hasattr(obj, part):
            raise RegistrationError(f"{module_name} has no {path!r}.", hint="name a variable or a function of it")
        obj = getattr(obj, part)
    return obj


def _described(error: Exception) -> str:
    return f"{type(error).__qualname__}: {error}"


# ------------------------------------------------------------ langgraph.json

_GRAPH_NAME = re.compile(r"(.+\.json)(?::(.+))?")
"""`langgraph.json:graph`, or the file alone if it has one graph."""
_GRAPH_HINT = 'e.g. {"graphs": {"agent": "./agent.py:graph"}}'


@dataclass(frozen=True, slots=True)
class GraphEntry:
    """A graph that a `langgraph.json` names."""

    source: str
    """`./folder/file.py:name`, with the file relative to the `langgraph.json`, or `package.module:name`."""
    description: str = ""


@dataclass(frozen=True, slots=True)
class LangGraphFile:
    """A `langgraph.json`, which says where the graphs of a project are and what they need.

    Of its keys `graphs`, `env` and `dependencies` count; the others are for LangGraph's own server.
    """

    path: Path
    graphs: Mapping[str, GraphEntry]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the environment, which may be keys of providers."""
    folders: tuple[Path, ...] = ()
    """Folders from which modules are imported: that of the file, and the local dependencies."""

    @classmethod
    def read(cls, path: str | Path) -> LangGraphFile:
        """Read the file. Raise `RegistrationError`, which names the wrong part."""
        path = Path(path).absolute()
        settings = _json_object(path)
        graphs = settings.get("graphs")
        if not isinstance(graphs, Mapping) or not graphs:
            raise RegistrationError(f"{path}: it names no graphs.", hint=_GRAPH_HINT)
        entries = {name: _graph_entry(path, name, value) for name, value in graphs.items()}
        return cls(path, entries, _environment(path, settings.get("env") or {}), tuple(_folders(path, settings)))

    def load(self, name: str | None, pool: Any = None) -> Any:
        """Import one graph, the only one if `name` is None. Return it compiled, or as the factory returned it.

        A factory, which may be async, is called once: without arguments, with an empty config or with the `pool`. The
        variables of the file are set in this process. Raise `RegistrationError` for what is no graph.
        """
        if name is None and len(self.graphs) > 1:
            hint = f"write {self.path.name}:{next(iter(self.graphs))}"
            raise RegistrationError(f"{self.path} has the graphs {', '.join(self.graphs)}.", hint=hint)
        name = next(iter(self.graphs)) if name is None else name
        if name not in self.graphs:
            raise unknown_name(f"graph of {self.path}", name, sorted(self.graphs))
        source = self.graphs[name].source
        where = f"{self.path}: the graph {name!r}"
        os.environ.update(self.environment)
        sys.path.extend(str(folder) for folder in self.folders if str(folder) not in sys.path)
        module_name, _, attribute = source.rpartition(":")
        module = self._module(module_name, where)
        if not hasattr(module, attribute):
            raise RegistrationError(f"{where}: {module_name} has no {attribute!r}.", hint="name a variable of it")
        graph = getattr(module, attribute)
        if not _is_graph(graph) and not hasattr(graph, "compile") and callable(graph):
            graph = _call_graph_factory(graph, where, source, pool)
        if hasattr(graph, "add_node") and hasattr(graph, "compile"):
            graph = graph.compile()
        original = graph[0] if isinstance(graph, tuple) and graph else graph
        if not _is_graph(original):
            hint = "name a compiled graph, a StateGraph, or a function that returns one"
            raise RegistrationError(f"{where}: {source} is a {type(graph).__qualname__}, which is no graph.", hint=hint)
        return graph

    def _module(self, name: str, where: str) -> ModuleType:
        """Import a module by its name, or from the file that `name` is. Raise `RegistrationError`."""
        try:
            if "/" not in name and not name.endswith(".py"):
                return importlib.import_module(name)
            file = (self.path.parent / name).resolve()
            if not file.is_file():
                raise RegistrationError(f"{where}: there is no file {file}.", hint="paths count from the JSON file")
            return _module_of_file(file)
        except RegistrationError:
            raise
        except Exception as error:
            hint = f"in {self.path.parent}, python must be able to run {name}"
            raise RegistrationError(f"{where}: importing {name} raised {_described(error)}", hint=hint) from error


def _module_of_file(file: Path) -> ModuleType:
    """Import a file under a name that is made of its path, as LangGraph's server does; once for all its graphs."""
    name = str(file).removesuffix(".py").replace(os.sep, "__").replace(" ", "_").lstrip(".")
    if (module := sys.modules.get(name)) is not None:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_graph(obj: Any) -> bool:
    """Return True for a compiled graph. No framework is imported."""
    return hasattr(obj, "channels") and hasattr(obj, "ainvoke") and not isinstance(obj, type)


def _call_graph_factory(factory: Any, where: str, source: str, pool: Any) -> Any:
    """Return what the function of a `langgraph.json` returns. Raise `RegistrationError` if it cannot be called."""
    parameters = inspect.signature(factory).parameters
    arguments: dict[str, Any] = {"pool": pool} if pool is not None and "pool" in parameters else {}
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [p for p in parameters.values() if p.default is p.empty and p.kind not in optional]
    rest = [p for p in required if p.name not in arguments]
    if any("Runtime" in str(p.annotation) or p.name == "runtime" for p in rest) or len(rest) > 1:
        hint = "a function may take the config of a run, and the pool"
        raise RegistrationError(f"{where}: {source} needs arguments that only LangGraph's server has.", hint=hint)
    arguments |= {p.name: {"configurable": {}} for p in rest}
    graph = made_by(factory, source, arguments)
    if inspect.isawaitable(graph):
        graph = made_by(lambda: _run_elsewhere(graph), source)
    if hasattr(graph, "__aenter__") or (hasattr(graph, "__enter__") and not _is_graph(graph)):
        hint = "return the graph itself: it is made once and lives as long as the server"
        raise RegistrationError(f"{where}: {source} returns a context manager.", hint=hint)
    return graph


def _run_elsewhere(awaitable: Any) -> Any:
    """Return the result of an awaitable, on a loop of a thread of its own: this thread may have a loop that runs."""

    async def wait() -> Any:
        return await awaitable

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, wait()).result()


def _json_object(path: Path) -> Mapping[str, Any]:
    """Read a `langgraph.json` and return its top-level object.

    Raise `RegistrationError`, with the line and a hint, if the file cannot be read, is not UTF-8, or holds no JSON
    object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        hint = "give the path of a langgraph.json"
        raise RegistrationError(f"{path}: {error.strerror or error}.", hint=hint) from None
    except UnicodeDecodeError as error:
        raise RegistrationError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from None
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise RegistrationError(f"{where}: {error.msg}.", hint="mend the JSON there") from None
    if not isinstance(settings, Mapping):
        raise RegistrationError(f"{path}: it holds no object.", hint=_GRAPH_HINT)
    return settings


def _graph_entry(path: Path, name: str, value: Any) -> GraphEntry:
    """Return the entry of a graph: its source, or an object with the source as `path`. Raise `RegistrationError`."""
    source = value.get("path") if isinstance(value, Mapping) else value
    module, _, attribute = source.rpartition(":") if isinstance(source, str) else ("", "", "")
    if not isinstance(source, str) or not (module and attribute):
        message = f"{path}: the graph {name!r} has no source of the form ./file.py:name or package.module:name."
        raise RegistrationError(message, hint=_GRAPH_HINT)
    if module.endswith((".js", ".ts", ".mjs", ".mts", ".cjs", ".cts", ".jsx", ".tsx")):
        raise RegistrationError(f"{path}: the graph {name!r} is no Python.", hint="leave it out of this file")
    description = value.get("description") if isinstance(value, Mapping) else None
    return GraphEntry(source, description if isinstance(description, str) else "")


def _environment(path: Path, env: Any) -> dict[str, str]:
    """Return the variables of `env`: an object, or a file of lines `KEY=VALUE`. Raise `RegistrationError`."""
    if isinstance(env, Mapping) and all(isinstance(value, str) for value in env.values()):
        return dict(env)
    if not isinstance(env, str):
        hint = 'e.g. {"env": {"KEY": "value"}} or {"env": "./.env"}'
        raise RegistrationError(f"{path}: env is neither an object of texts nor a file.", hint=hint)
    file = path.parent / env
    try:
        return dict(_environment_lines(file))
    except OSError as error:
        hint = "env is a file beside it, or an object of variables"
        raise RegistrationError(f"{path}: {file}: {error.strerror or error}.", hint=hint) from None


def _environment_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the variables of the environment file that a `langgraph.json` names: lines `KEY=VALUE`.

    Lines may have `export`, quotes and comments.

    Raise `RegistrationError` for a line of another form.
    """
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, value = name.strip(), value.strip()
        if not equals or not name:
            raise RegistrationError(f"{file}, line {number}: it is not of the form KEY=VALUE.", hint="mend it there")
        if quoted := re.match(r"""(["'])(.*?)\1\s*(#.*)?$""", value):
            yield name, quoted[2]
        else:
            yield name, re.split(r"\s+#", value)[0]


def _folders(path: Path, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folder of the file, and those among its `dependencies`; others are packages, installed already."""
    yield path.parent
    dependencies = settings.get("dependencies") or []
    if not isinstance(dependencies, list) or not all(isinstance(one, str) for one in dependencies):
        raise RegistrationError(f"{path}: dependencies is no list of texts.", hint='e.g. {"dependencies": ["."]}')
    for dependency in dependencies:
        folder = (path.parent / dependency).resolve()
        if folder.is_dir():
            yield folder
        elif dependency.startswith("."):
            raise RegistrationError(f"{path}: there is no folder {folder}.", hint="mend its dependencies")
