"""An engine of the cluster as an app's objects see it, and the settings that its replica reports for that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.cluster.wire import EngineFacts
from teola_plugin.engines.base import Engine, EngineLoad
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Request, Result

_ATTRIBUTES = (
    "model_name",
    "dimension",
    "normalize",
    "max_length",
    "sized_by_text",
    "options",
    "prompts",
    "base_url",
    "prefix_caching",
    "joins",
    "carries_openai",
    "carries_embeddings",
    "form",
    "takes_late_readers",
)
"""Attributes of engines that objects of frameworks read, above all those in `bind=`, which compare themselves."""
_ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The attributes of a loaded model that are compared; None for those that it does not have."""

    max_seq_length: int | None
    truncate_dim: int | None
    dtype: str


def settings_of(engine: Engine) -> dict[str, Any]:
    """Return the attributes that an app's objects may read from an engine, as plain data."""
    settings = {name: _plain(getattr(engine, name)) for name in _ATTRIBUTES if hasattr(engine, name)}
    prompt_of = getattr(engine, "prompt_of", None)
    if prompt_of is not None:
        settings["role_prompts"] = {role: prompt_of(role) for role in _ROLES}
    model = getattr(engine, "model", None)
    if model is not None:
        settings["model"] = model if isinstance(model, str) else _loaded(model)
    return settings


def _loaded(model: Any) -> LoadedModel:
    limit, cut = (getattr(model, name, None) for name in ("max_seq_length", "truncate_dim"))
    return LoadedModel(limit, cut, str(getattr(model, "dtype", None)))


def _plain(value: Any) -> Any:
    """Return the value without classes that an app may not have: other objects become their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value)
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


class SharedEngine:
    """An `Engine` in name, kinds, profile, versions and settings; it executes nothing in this process."""

    def __init__(self, facts: EngineFacts) -> None:
        self.name = facts.name
        self.kinds: frozenset[PrimitiveKind] = facts.kinds
        self.facts = facts

    def take(self, facts: EngineFacts) -> None:
        """Replace the facts by newer ones of the same engine."""
        self.facts = facts

    @property
    def profile(self) -> EngineProfile:
        return self.facts.profile

    def versions(self) -> Mapping[str, str]:
        return self.facts.versions

    def __getattr__(self, name: str) -> Any:
        """Return a setting that the engine's host has reported, as if it were an attribute of a local engine.

        Raise AttributeError for a name that begins with an underscore, and for one that is not among the settings.
        """
        if not name.startswith("_") and name in self.facts.settings:
            return self.facts.settings[name]
        raise AttributeError(f"engine {self.__dict__.get('name')!r} of the shared pool has no {name!r} here")

    def prompt_of(self, role: str) -> str:
        """Return the text that an embedding engine puts before a text of that role.

        Return an empty text if the host reported no prefix for that role.
        """
        prompts: Mapping[str, str] = self.facts.settings.get("role_prompts", {})
        return prompts.get(role, "")

    # Operations of the replicas alone

    async def start(self) -> None:
        """Do nothing: the pool starts its engines."""

    async def stop(self) -> None:
        """Do nothing: the pool ends its engines."""

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Raise `EngineError`: only the pool's replicas execute requests."""
        raise EngineError(
            f"engine {self.name!r} runs in the shared pool and executes nothing in this process.",
            engine=self.name,
            hint="call it through its pool",
        )

    async def cancel(self, request_id: str) -> None:
        """Do nothing: requests are cancelled at the pool."""

    def size(self, request: Request) -> float:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def reset(self) -> None:
        """Do nothing: see `EnginePool.reset`."""
