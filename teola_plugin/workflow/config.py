"""What a query changes of a workflow: settings of its components, checked, frozen, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.workflow.component import Flow
from teola_plugin.workflow.settings import Setting, plain_settings

_Values = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


@dataclass(frozen=True, slots=True)
class Config(Mapping[str, Mapping[str, Any]]):
    """Settings by component, then by name; only those that differ from the workflow's own.

    Frozen, hashable, equal to one that says the same in other words. Made by `workflow.config(...)`.
    """

    settings: _Values = ()

    def __getitem__(self, component: str) -> Mapping[str, Any]:
        return dict(dict(self.settings)[component])

    def __iter__(self) -> Iterator[str]:
        return iter(name for name, _ in self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the settings as JSON data; `workflow.config` turns it back into an equal configuration."""
        return {name: plain_settings(dict(settings)) for name, settings in self.settings}


def config_of(flow: Flow, values: Mapping[str, Any], workflow: str) -> Config:
    """Return the configuration of a workflow from settings by name. Raise RegistrationError for an invalid one.

    `values` name settings by component (`{"found": {"k": 8}}`), by both (`{"found.k": 8}`), or by their own name if
    only one component has it (`{"chunk_size": 128}`).
    """
    if isinstance(values, Config):
        values = dict(values)
    if not isinstance(values, Mapping):
        raise RegistrationError(
            f"workflow {workflow!r} was configured with {values!r:.80}.", hint='give a mapping, e.g. {"found.k": 8}'
        )
    settings = known_settings(flow)
    changed: dict[str, dict[str, Any]] = {}
    for (component, name), value in _pairs(values, settings):
        setting = settings[component][name]
        checked = setting.checked(value, f"{component}.{name}")
        if checked != setting.default:
            changed.setdefault(component, {})[name] = checked
    return Config(
        tuple((name, tuple(sorted(changes.items(), key=_name))) for name, changes in sorted(changed.items(), key=_name))
    )


def known_settings(flow: Flow) -> dict[str, dict[str, Setting]]:
    """Return all settings of a flow, by component and name."""
    return {one.name: one.settings() for one in flow.everything() if one.settings()}


def config_schema(flow: Flow) -> dict[str, Any]:
    """Return the JSON schema of a configuration: an object of components, each an object of its settings."""
    settings = known_settings(flow)
    components = {
        name: _object({key: one.schema() for key, one in own_settings.items()})
        for name, own_settings in settings.items()
    }
    return _object(components)


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _pairs(values: Mapping[str, Any], settings: dict[str, dict[str, Setting]]) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield ((component, setting), value) for all forms in which settings may be named; see `config_of`."""
    for key, value in values.items():
        if key in settings and isinstance(value, Mapping):
            for name, inner in value.items():
                yield _split_key(f"{key}.{name}", settings), inner
        else:
            yield _split_key(str(key), settings), value


def _split_key(key: str, settings: dict[str, dict[str, Setting]]) -> tuple[str, str]:
    """The component and the setting that `key` is for."""
    component, dot, name = key.partition(".")
    every = [f"{one}.{setting}" for one, owners in settings.items() for setting in owners]
    if dot:
        if name not in settings.get(component, {}):
            raise unknown_name("setting", key, every)
        return component, name
    owners = [one for one, owners in settings.items() if key in owners]
    if not owners:
        raise unknown_name("setting", key, every)
    if len(owners) > 1:
        raise RegistrationError(f"{key!r} is a setting of {', '.join(owners)}.", hint=f"say which: {owners[0]}.{key}")
    return owners[0], key
