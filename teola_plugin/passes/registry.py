"""A registry of passes by name: those of this package, and those that other packages register as entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.passes.base import Pass, PassPipeline, PassReport
from teola_plugin.passes.decoding_pipelining import DecodingPipelining
from teola_plugin.passes.draft_decoding import DraftDecoding
from teola_plugin.passes.prefilling_split import PrefillingSplit
from teola_plugin.passes.prune_dependencies import PruneDependencies
from teola_plugin.passes.stage_decomposition import StageDecomposition

GROUP = "teola_plugin.passes"
"""Entry-point group. An entry names a Pass, or a callable without arguments that returns one."""

DEFAULT_PASSES: tuple[Pass, ...] = (
    PruneDependencies(),
    StageDecomposition(),
    PrefillingSplit(),
    DecodingPipelining(),
    DraftDecoding(),
)


def default_pipeline(observer: Callable[[PassReport], None] | None = None) -> PassPipeline:
    """Return a pipeline of the four passes of the paper, in its order, followed by DraftDecoding."""
    return PassPipeline(DEFAULT_PASSES, observer)


def known_passes() -> tuple[str, ...]:
    """Return the names that `find_pass` accepts, sorted."""
    return tuple(sorted({one.name for one in DEFAULT_PASSES} | set(_entry_points())))


def find_pass(name: str) -> Pass:
    """Return the pass of that name. Raise RegistrationError if there is none."""
    for one in DEFAULT_PASSES:
        if one.name == name:
            return one
    entry = _entry_points().get(name)
    if entry is None:
        raise unknown_name("pass", name, known_passes())
    return _load(entry)


def resolve_passes(passes: Iterable[Pass | str]) -> tuple[Pass, ...]:
    """Return `passes` with each name replaced by its pass. Raise RegistrationError for an unknown name.

    Raise it also for a single text, which is iterable, but no list of passes.
    """
    if isinstance(passes, str):
        raise RegistrationError(f"passes is the text {passes!r}.", hint=f"give a list: passes=[{passes!r}]")
    return tuple(find_pass(one) if isinstance(one, str) else one for one in passes)


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> Pass:
    """Return the pass of an entry point. Raise RegistrationError if it cannot be imported or is no Pass."""
    try:
        target = entry.load()
        graph_pass = target() if isinstance(target, type) or not isinstance(target, Pass) else target
    except Exception as error:
        message = f"pass {entry.name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        raise RegistrationError(message, hint="repair or uninstall the package that offers it") from error
    if not isinstance(graph_pass, Pass):
        message = f"pass {entry.name!r} ({entry.value}) is a {type(graph_pass).__name__}, not a Pass."
        raise RegistrationError(message, hint="give it a `name` and `run(graph, context)`")
    return graph_pass
