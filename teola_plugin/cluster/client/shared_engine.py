"""What an app's objects see of an engine that runs elsewhere, and what its instance tells for that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.cluster.wire import EngineFacts
from teola_plugin.engines.base import Engine, EngineLoad
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Result

_TOLD = (
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
    "listens",
)
"""Attributes of engines that objects of frameworks ask for, above all those in `bind=`, which compare themselves."""
_ROLES = ("query", "document")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What is compared of a model that is loaded over there; None for what it does not have."""

    max_seq_length: int | None
    truncate_dim: int | None
    dtype: str


def settings_of(engine: Engine) -> dict[str, Any]:
    """What an app's objects may ask of an engine, as plain data."""
    found = {name: _plain(getattr(engine, name)) for name in _TOLD if hasattr(engine, name)}
    prompt_of = getattr(engine, "prompt_of", None)
    if prompt_of is not None:
        found["role_prompts"] = {role: prompt_of(role) for role in _ROLES}
    model = getattr(engine, "model", None)
    if model is not None:
        found["model"] = model if isinstance(model, str) else _loaded(model)
    return found


def _loaded(model: Any) -> LoadedModel:
    limit, cut = (getattr(model, name, None) for name in ("max_seq_length", "truncate_dim"))
    return LoadedModel(limit, cut, str(getattr(model, "dtype", None)))


def _plain(value: Any) -> Any:
    """The value without classes that an app may not have; what is left out stands as its text, which equals nothing."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(one) for one in value)
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


class SharedEngine:
    """An `Engine` in name, kinds, profile, versions and settings; it executes nothing here."""

    def __init__(self, facts: EngineFacts) -> None:
        self.name = facts.name
        self.kinds: frozenset[PrimitiveKind] = facts.kinds
        self.facts = facts

    def take(self, facts: EngineFacts) -> None:
        """Newer facts of the same engine."""
        self.facts = facts

    @property
    def profile(self) -> EngineProfile:
        return self.facts.profile

    def versions(self) -> Mapping[str, str]:
        return self.facts.versions

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.facts.settings:
            return self.facts.settings[name]
        raise AttributeError(f"engine {self.__dict__.get('name')!r} of the shared pool has no {name!r} here")

    def prompt_of(self, role: str) -> str:
        """What an embedding engine puts before a text of that role."""
        prompts: Mapping[str, str] = self.facts.settings.get("role_prompts", {})
        return prompts.get(role, "")

    # What only the instances do

    async def start(self) -> None:
        """Nothing: the pool starts its engines."""

    async def stop(self) -> None:
        """Nothing: the pool ends its engines."""

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        raise EngineError(
            f"engine {self.name!r} runs in the shared pool and executes nothing in this process.",
            engine=self.name,
            hint="call it through its pool",
        )

    async def cancel(self, request_id: str) -> None:
        """Nothing: requests are cancelled at the pool."""

    def size(self, request: Request) -> float:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def reset(self) -> None:
        """Nothing: see `EnginePool.reset`."""
