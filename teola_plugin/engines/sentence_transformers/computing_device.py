"""Where an engine of this folder computes: as its user said; else the card with most room; else the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from teola_plugin.engines.devices.budget import Demand, Grant
from teola_plugin.engines.devices.cards import GIB, device_name
from teola_plugin.engines.devices.weights import weight_bytes
from teola_plugin.errors import ConfigError
from teola_plugin.graph.device import normalize

WORK = 2 * GIB
"""A CUDA context and the largest forward pass: 32 texts of 512 tokens through a model of BERT's large size."""
UNKNOWN = 2 * GIB
"""Weights of a model that has not been downloaded."""


def said_device(device: str | None, cores: Sequence[int]) -> str:
    """Return the device that the user chose, "" if none. Choosing cores chooses the CPU."""
    return normalize(device) if device else "cpu" if cores else ""


def demand_of(engine: str, model: str, said: str, share: float | None) -> Demand:
    """Return the memory that an engine with that model needs on its card. Raise ConfigError for an invalid share."""
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"{engine}: gpu_memory_utilization is {share:g}.",
            hint="give a share of the card, above 0 and up to 1",
        )
    if said and not said.startswith("cuda"):
        return Demand(engine, said)
    weights = weight_bytes(model)
    if weights is None:
        return Demand(engine, said, share=share, work=WORK + UNKNOWN)
    return Demand(engine, said, share=share, needs=weights, work=WORK)


def profile_device(device: str, cores: Sequence[int]) -> str:
    """The name by which engines know that they do not overlap; unpinned ones on a CPU mostly do."""
    if device == "cpu":
        return f"cpu:{','.join(map(str, cores))}" if cores else ""
    given = Grant(device)
    return device_name(given.indices) if given.indices else device
