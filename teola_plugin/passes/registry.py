"""Passes by name: those of this package, and those that other packages offer as entry points."""

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
"""Entry-point group; an entry names a Pass, or something that makes one without arguments."""

DEFAULT_PASSES: tuple[Pass, ...] = (
    PruneDependencies(),
    StageDecomposition(),
    PrefillingSplit(),
    DecodingPipelining(),
    DraftDecoding(),
)


def default_pipeline(observer: Callable[[PassReport], None] | None = None) -> PassPipeline:
    """The four passes of the paper, in its order, and drafts."""
    return PassPipeline(DEFAULT_PASSES, observer)


def known_passes() -> tuple[str, ...]:
    """Names that `find_pass` takes, sorted."""
    return tuple(sorted({one.name for one in DEFAULT_PASSES} | set(_offered())))


def find_pass(name: str) -> Pass:
    """The pass of that name. Raises `RegistrationError`."""
    for one in DEFAULT_PASSES:
        if one.name == name:
            return one
    entry = _offered().get(name)
    if entry is None:
        raise unknown_name("pass", name, known_passes())
    return _made(entry)


def resolve_passes(passes: Iterable[Pass | str]) -> tuple[Pass, ...]:
    """Pass objects as they are, names looked up. Raises `RegistrationError`."""
    if isinstance(passes, str):
        raise RegistrationError(f"passes is the text {passes!r}.", hint=f"give a list: passes=[{passes!r}]")
    return tuple(find_pass(one) if isinstance(one, str) else one for one in passes)


@cache
def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _made(entry: EntryPoint) -> Pass:
    try:
        found = entry.load()
        made = found() if isinstance(found, type) or not isinstance(found, Pass) else found
    except Exception as error:
        message = f"pass {entry.name!r} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}"
        raise RegistrationError(message, hint="repair or uninstall the package that offers it") from error
    if not isinstance(made, Pass):
        message = f"pass {entry.name!r} ({entry.value}) is a {type(made).__name__}, not a Pass."
        raise RegistrationError(message, hint="give it a `name` and `run(graph, context)`")
    return made
