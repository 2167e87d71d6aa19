"""`teola serve`, which serves a pool and apps over HTTP, and `teola key`, which makes keys for its clients."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from teola_plugin.errors import require_modules

if TYPE_CHECKING:
    from teola_plugin.server.settings import ServerSettings, ServiceConfig

_MODULES = ("fastapi", "uvicorn", "prometheus_client", "pydantic", "yaml", "httpx", "pypdf", "python_multipart")
"""Modules of the extra `server` that `teola serve` imports; python_multipart is imported by Starlette."""
_THIS_MACHINE = "own"
"""The value of `--connect` without an address: the pool that was started on this machine."""


def add_serve(commands: Any) -> None:
    """Add the sub-commands to an argparse group."""
    text = "serve a pool and apps over HTTP, in OpenAI's protocol and Anthropic's"
    serve = commands.add_parser("serve", help=text, description=text[0].upper() + text[1:] + ".")
    serve.add_argument(
        "config",
        help="the pool's YAML file; its `server`, `apps` and `langgraph` are read here. Or a langgraph.json, whose "
        "graphs are served on models of their own",
    )
    serve.add_argument("--host", help="address to listen at (default: that of the file, else 127.0.0.1)")
    serve.add_argument("--port", type=int, help="port; 0 for any that is free (default: that of the file, else 8000)")
    serve.add_argument(
        "--connect",
        nargs="?",
        const=_THIS_MACHINE,
        metavar="ADDRESS",
        help="use the shared pool of that name which `teola up` started, instead of engines in this process",
    )
    serve.set_defaults(run=run_serve)
    text = "make an API key for `teola serve`"
    key = commands.add_parser("key", help=text, description=text[0].upper() + text[1:] + ".")
    key.add_argument("name", help="whose it is, for logs")
    key.set_defaults(run=run_key)


def run_key(options: argparse.Namespace) -> int:
    """Print a new key, which is stored nowhere, and the lines for the file, which hold its hash."""
    from rich.console import Console

    from teola_plugin.server.callers import new_key

    key, console = new_key(), Console(highlight=False, soft_wrap=True, markup=False)
    console.print(key.secret)
    console.print(f"\nKeep it; it is not shown again. In the file, under `server: keys:`\n\n  - name: {options.name}")
    console.print(f'    hash: "{key.hash}"\n    tenant: {options.name}')
    return 0


def run_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it, and return exit status 0 then."""
    require_modules("teola serve", _MODULES, "server")
    from rich.console import Console

    from teola_plugin.server.app import address_of, check_files, listening, run
    from teola_plugin.server.logs import logging_to_stderr

    config = _config(options.config)
    settings = _settings(config, options)
    check_files(settings)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    with ExitStack() as stack:
        stack.enter_context(logging_to_stderr(settings))
        bound = stack.enter_context(listening(settings))
        tracing = _tracing(settings)
        if tracing is not None:
            stack.callback(tracing.shutdown)
        with Console(stderr=True).status(f"starting {', '.join([*config.engines, *config.apps])} ..."):
            pool = stack.enter_context(_pool(config, options.connect, tracing))
            from teola_plugin.server.queries.store import store_of
            from teola_plugin.server.service import Service

            service = Service(pool, settings, config.apps, tracing)
            store = store_of(settings.store, settings.data, config.name)
        url = address_of(settings, bound)
        run(service, store, bound, lambda: _print_welcome(console, url, service.models, bool(settings.keys)))
    return 0


def _config(path: str) -> ServiceConfig:
    """Return the settings of a pool's file, or those of a `langgraph.json` alone. Raise `TeolaError`."""
    from teola_plugin.server.settings import ServiceConfig

    if path.endswith(".json"):
        return ServiceConfig.model_validate({"langgraph": path}).with_graphs()
    return ServiceConfig.read(path).with_graphs()


def _settings(config: ServiceConfig, options: argparse.Namespace) -> ServerSettings:
    """Return the settings of the file, with those of the command line over them. Raise ConfigError for invalid ones."""
    from pydantic import ValidationError

    from teola_plugin.errors import ConfigError

    overrides = {"host": options.host, "port": options.port}
    values = config.server.model_dump() | {key: value for key, value in overrides.items() if value is not None}
    try:
        return type(config.server)(**values)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{message}.", hint="see docs/server.md") from None


def _tracing(settings: ServerSettings) -> Any:
    """Return the tracer provider that the file configures; None if it configures none."""
    if settings.tracing is None:
        return None
    from teola_plugin.server.tracing import provider_of

    return provider_of(settings.tracing)


def _pool(config: ServiceConfig, connect: str | None, tracing: Any) -> Any:
    """Return the pool to serve: engines in this process, or with `connect` the shared pool of the file's name."""
    from teola_plugin.pool import EnginePool

    if connect is None:
        return EnginePool.from_yaml(config, tracing=tracing)
    pool = EnginePool.connect(None if connect == _THIS_MACHINE else connect, pool=config.name, tracing=tracing)
    pool.prices = config.price_table
    return pool


def _python_command() -> str:
    """Return this interpreter as one types it in the current folder."""
    folder = os.getcwd() + os.sep
    return sys.executable.removeprefix(folder) or "python"


def _print_welcome(console: Any, url: str, models: Any, has_keys: bool) -> None:
    """Print three ways to send a request, each of which can be copied and run."""
    names = [name for kind in ("app", "chat") for name, model in models.items() if model.kind == kind]
    console.print(f"serving {', '.join(models)} at {url}")
    if names:
        text = models[names[0]].details().get("example") or "Hello"
        for command in request_commands(url, names[0], text, has_keys=has_keys):
            console.print(f"  {command}")
    console.print(f"  a browser: {url}/")


def request_commands(url: str, model: str, text: str, *, has_keys: bool) -> tuple[str, str]:
    """Return two shell commands that send a request to the model: with curl, and with the official client."""
    header = ' -H "Authorization: Bearer $TEOLA_API_KEY"' if has_keys else ""
    body = shlex.quote(json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}))
    arguments = f"model={json.dumps(model)}, input={json.dumps(text)}"
    code = (
        f'import openai, os; c = openai.OpenAI(base_url="{url}/v1", api_key=os.getenv("TEOLA_API_KEY", "none")); '
        f"print(c.responses.create({arguments}).output_text)"
    )
    curl = f"curl -s {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d {body}"
    return curl, f"{shlex.quote(_python_command())} -c {shlex.quote(code)}"
