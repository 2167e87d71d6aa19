"""`teola up`, `status`, `scale`, `down` and `calibrate`: the shared pool from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teola_plugin.cluster.config import PoolConfig


def add_pool(commands: Any) -> None:
    """Add the sub-commands to an argparse group."""
    up = _command(commands, "up", run_up, "start a shared pool of engines on Ray from its YAML")
    up.add_argument("config", help="the pool's YAML file")
    _add_address(up, with_pool=False)
    up.add_argument(
        "--host",
        default="",
        help="ADDRESS[:PORT] at which other machines reach this one (default: this machine alone uses the pool). "
        "Ray then listens on every interface, behind its token",
    )
    status = _command(commands, "status", run_status, "how the engines of a shared pool are")
    _add_address(status)
    status.add_argument("--json", action="store_true", help="print one JSON list, and nothing else")
    scale = _command(commands, "scale", run_scale, "add or take away replicas while queries run")
    scale.add_argument("engine", help="the name of the engine in the pool's YAML")
    scale.add_argument("replicas", type=count, help="how many replicas it is to have")
    _add_address(scale)
    _add_address(_command(commands, "down", run_down, "end a shared pool, and its Ray cluster if `up` started one"))
    calibrate = _command(commands, "calibrate", run_calibrate, "measure the engines of a pool's YAML on this machine")
    calibrate.add_argument("config", help="the pool's YAML file")
    calibrate.add_argument("--engine", action="append", help="only this one (may be repeated)")
    calibrate.add_argument("--json", action="store_true", help="print the profiles as one JSON object")


def _command(commands: Any, name: str, run: Any, text: str) -> Any:
    """Add a subcommand to the command line and return its parser, to which the caller adds the options.

    `run` is stored in the parsed arguments as `run`; the subcommand's description is `text` as a sentence.
    """
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_address(parser: Any, *, with_pool: bool = True) -> None:
    """Add the option for the address of a Ray cluster and, with `with_pool`, the one for a pool's name to a parser.

    Both may be left out by the user: the cluster is then one of the pool's own on this machine, the pool `default`.
    """
    parser.add_argument("--address", help="the Ray cluster, host:port (default: one of its own on this machine)")
    if with_pool:
        parser.add_argument("--pool", default="default", help="the pool's name (default: default)")


def run_up(options: argparse.Namespace) -> int:
    """Start the pool. Return exit status 0 once every engine is up."""
    from rich.console import Console

    from teola_plugin.cluster import deploy
    from teola_plugin.cluster.config import PoolConfig
    from teola_plugin.cluster.deployment.records import DeploymentRecord

    config = PoolConfig.read(options.config)
    console, notes = Console(), Console(stderr=True)
    with notes.status(f"starting {', '.join(config.engines)} ..."):
        address = deploy.up(
            config,
            options.address,
            host=options.host,
            on_started=lambda facts: console.print(f"{facts.name}: {len(facts.replicas)} up", highlight=False),
            on_waiting=lambda text: notes.print(text, highlight=False, soft_wrap=True),
        )
    console.print(f"pool {config.name!r} at {address}", highlight=False)
    console.print(f"  in an app:  EnginePool.connect({address!r}, pool={config.name!r})", highlight=False)
    if (record := DeploymentRecord.read(config.name)) is not None and record.token:
        console.print(f"  its token:  {record.token}", highlight=False, soft_wrap=True)
    console.print(f"  to end it:  teola down --pool {config.name}", highlight=False)
    return 0


def run_status(options: argparse.Namespace) -> int:
    """Print the state of each replica. Return exit status 1 if an engine or a replica is not up."""
    from teola_plugin.cluster import deploy

    engines = deploy.status(options.pool, options.address)
    if options.json:
        json.dump(engines, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_status(engines)
    return 0 if all(engine["running"] and all(i["up"] for i in engine["replicas"]) for engine in engines) else 1


def _print_status(engines: list[dict[str, Any]]) -> None:
    """Print a table of all replicas of a shared pool, with their state and load."""
    from rich.console import Console
    from rich.table import Table

    table = Table("engine", "replica", "state", "running", "queued", "KV used", "process", "clients")
    for engine in engines:
        if not engine["replicas"]:
            table.add_row(engine["engine"], "", f"down {engine.get('error', '')}", "", "", "", "", "")
        for replica in engine["replicas"]:
            state = "up" if replica["up"] else "starting"
            load = (replica["running"], engine["queued"], f"{replica['kv_used']:.0%}")
            cells = (*load, replica["pid"], engine["clients"])
            table.add_row(engine["engine"], replica["replica"], state, *map(str, cells))
    Console().print(table)


def run_scale(options: argparse.Namespace) -> int:
    """Run `teola scale`: change the number of an engine's replicas, and print the new one. Return exit status 0."""
    from rich.console import Console

    from teola_plugin.cluster import deploy

    replicas = deploy.scale(options.pool, options.engine, options.replicas, options.address)
    Console().print(f"{options.engine}: {replicas} replicas", highlight=False)
    return 0


def run_down(options: argparse.Namespace) -> int:
    """Run `teola down`: end the shared pool. Return exit status 0."""
    from rich.console import Console

    from teola_plugin.cluster import deploy

    with Console(stderr=True).status(f"ending {options.pool} ..."):
        deploy.down(options.pool, options.address)
    Console().print(f"pool {options.pool!r} is down", highlight=False)
    return 0


def run_calibrate(options: argparse.Namespace) -> int:
    """Run `teola calibrate`: measure the engines of a pool's file and print their profiles. Return exit status 0.

    Raise `RegistrationError` for the name of an engine that the file does not have.
    """
    import asyncio

    from teola_plugin.cluster.config import PoolConfig
    from teola_plugin.errors import unknown_name

    config = PoolConfig.read(options.config)
    for name in options.engine or ():
        if name not in config.engines:
            raise unknown_name("engine", name, list(config.engines))
    profiles = asyncio.run(_measure_profiles(config, options.engine or list(config.engines)))
    if options.json:
        json.dump(profiles, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_profiles(profiles)
    return 0


async def _measure_profiles(config: PoolConfig, names: Sequence[str]) -> dict[str, Any]:
    """Measure engines one after the other, so that they do not disturb each other, and return their profiles.

    Profiles are JSON-ready data by engine, and are stored where passes, batcher and simulator find them. One replica
    of each engine is started here, without Ray. Raise what the engines raise.
    """
    from teola_plugin.cluster.deployment.engine_factory import build_engine
    from teola_plugin.cluster.names import engine_spec
    from teola_plugin.engines.profiles import calibrate, to_json
    from teola_plugin.observe import progress

    profiles: dict[str, Any] = {}
    with progress(len(names), "calibrating") as bar:
        for name in names:
            bar.describe(f"calibrating {name}")
            engine = build_engine(engine_spec(name, config.engines[name]), 0)
            await engine.start()
            try:
                profiles[name] = to_json(await calibrate(engine, fresh=True))
            finally:
                await engine.stop()
            bar.advance()
    return profiles


def _print_profiles(profiles: dict[str, Any]) -> None:
    """Print a table of measured profiles: for each engine and kind of primitive the seconds by size."""
    from rich.console import Console
    from rich.table import Table

    table = Table("engine", "kind", "seconds by size", "efficient batch", "device")
    for name, profile in profiles.items():
        for kind, points in profile["curves"].items() or [("not measured", [])]:
            curve = ", ".join(f"{size}: {seconds:.4f}" for size, seconds in points)
            table.add_row(name, kind, curve, str(profile["max_efficient_batch"]), profile["device"])
    Console().print(table)


def count(text: str) -> int:
    """Parse a whole number of 1 or more. Raise `ArgumentTypeError`, which argparse prints as one line."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
