"""The cards on which engines compute, and the memory that each may use. Pure: figures in, figures out.

The rule, for every card:

1. The user's settings hold: a device, a share of the memory (`gpu_memory_utilization`).
2. An engine without a device gets the card with most room; LLMs choose first, and the others avoid their cards. If no
   card has as much free as its model and its work take, it gets the CPU.
3. An engine without a share gets what its model needs, as far as that is known, and room to work.
4. An LLM without a share gets what is left, too, but for `KEPT_FREE` of the card; several of them get equal parts of
   that. Alone on its cards it keeps vLLM's own default.
5. If the shares that were set and the models of the others are more than the card has free, nothing starts. (Room to
   work is an estimate: it is left where it can be, and stops nobody.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from teola_plugin.engines.devices.cards import GIB, Card
from teola_plugin.errors import ConfigError, EngineUnavailable
from teola_plugin.graph.device import Device, normalize, parse

KEPT_FREE = 0.08
"""Share of a card that stays free for CUDA contexts, libraries and fragments, as much as vLLM leaves by default."""
_HINT = (
    "lower gpu_memory_utilization (of an LLM: in engine_args), or give an engine another device: device='cuda:1', 'cpu'"
)


@dataclass(frozen=True, slots=True)
class Demand:
    """The memory that an engine asks for before it starts. Bytes and shares are per card."""

    engine: str
    device: str = ""
    """The device that the user has set; "" for a card if there is one."""
    cards: int = 1
    share: float | None = None
    """Share of the card's memory that the user has set."""
    needs: int = 0
    """Bytes of its weights, as far as known."""
    work: int = 0
    """Bytes that it needs to work, roughly."""
    fills: bool = False
    """True if it takes all that it may, as the KV cache of an LLM does."""

    def min_bytes(self, card: Card) -> int:
        """Return the bytes without which it does not start."""
        return self.needs if self.share is None else math.ceil(self.share * card.total)

    def fair_bytes(self, card: Card) -> int:
        """Return the bytes that other engines are to leave to it."""
        return self.needs + self.work if self.share is None else self.min_bytes(card)


@dataclass(frozen=True, slots=True)
class Grant:
    """The device of an engine, and the share of its memory that it may use."""

    device: str
    """The device as torch calls it in this process (`cuda:1`, `cpu`); "" for an LLM without a card."""
    share: float | None = None
    """Share of each card's memory; None if only the engine itself limits it."""

    @property
    def indices(self) -> tuple[int, ...]:
        return _indices(parse(self.device))


@dataclass(slots=True)
class _Load:
    """A card, and the demands that were assigned to it."""

    card: Card
    on: list[Demand] = field(default_factory=list)

    @property
    def room(self) -> tuple[int, int, int]:
        """The key for comparing cards: fewer LLMs, then more bytes, then the lower number."""
        fillers = sum(demand.fills for demand in self.on)
        return -fillers, self.spare, -self.card.index

    @property
    def spare(self) -> int:
        return self.card.free - sum(demand.fair_bytes(self.card) for demand in self.on)

    @property
    def min_bytes(self) -> int:
        return sum(demand.min_bytes(self.card) for demand in self.on)


def allot(demands: Sequence[Demand], cards: Sequence[Card], why_none: str = "") -> tuple[Grant, ...]:
    """Return a grant for each demand. `why_none` says why there are no cards, if there are none.

    Raises `ConfigError` (no such card, more memory than a card has) and `EngineUnavailable` (more than is free now).
    """
    loads = {card.index: _Load(card) for card in cards}
    card_indices: dict[int, tuple[int, ...]] = {}
    for at, demand in sorted(enumerate(demands), key=_sort_key):
        card_indices[at] = _choose_cards(demand, loads, why_none)
        for index in card_indices[at]:
            loads[index].on.append(demand)
    for load in loads.values():
        _check(load)
    return tuple(_grant(demand, [loads[index] for index in card_indices[at]]) for at, demand in enumerate(demands))


def _sort_key(one: tuple[int, Demand]) -> tuple[bool, bool, int, int]:
    """Return the sort key of a demand: first engines with a device of their own, then LLMs, then the largest."""
    at, demand = one
    return not demand.device, not demand.fills, -demand.needs, at


def _choose_cards(demand: Demand, loads: dict[int, _Load], why_none: str) -> tuple[int, ...]:
    """Return the numbers of the cards on which an engine computes; () for the CPU or another device.

    Without a device that the user has set, these are the cards with most room; an engine that is no LLM gets none if it
    fits on none. Raise `ConfigError` for cards that do not exist.
    """
    device = parse(normalize(demand.device))
    if demand.device and device.kind != "cuda":
        return ()
    if not loads and not demand.device:
        return ()
    indices = _indices(device)
    if any(index not in loads for index in indices):
        raise _unknown_card_error(demand.engine, str(device), [load.card for load in loads.values()], why_none)
    if demand.cards > len(loads):
        raise ConfigError(
            f"{demand.engine} asks for {demand.cards} GPUs; there {_are(len(loads))}: {_listed(loads.values())}.",
            hint="lower tensor_parallel_size (or pipeline_parallel_size) in engine_args",
        )
    if indices:
        return indices
    best = sorted(loads.values(), key=lambda load: load.room, reverse=True)[: demand.cards]
    if (
        not demand.fills
        and demand.share is None
        and all(demand.fair_bytes(load.card) > load.card.free for load in best)
    ):
        return ()
    return tuple(sorted(load.card.index for load in best))


def _indices(device: Device) -> tuple[int, ...]:
    """Return the numbers of cards; -1 for those that torch does not accept."""
    if device.kind != "cuda":
        return ()
    return tuple(sorted(int(unit) if unit.isdecimal() else -1 for unit in device.units))


def _unknown_card_error(engine: str, device: str, cards: Sequence[Card], why_none: str) -> ConfigError:
    """Return the error for an engine whose device is no card of this machine; it lists the cards that there are."""
    if not cards:
        return ConfigError(
            f"{engine} is to compute on {device}, and there is no GPU: {why_none or 'none is seen'}.",
            hint="leave the device (in a pool's YAML: gpus) out, then it is the CPU here; or say device='cpu'; on a "
            "machine with a GPU, install torch for CUDA",
        )
    listed = ", ".join(map(str, cards))
    return ConfigError(
        f"{engine} is to compute on {device}; there {_are(len(cards))}: {listed}.",
        hint="give one of these, or leave the device out: the card with most room is taken",
    )


def _check(load: _Load) -> None:
    """Raise an error for a card on which more is demanded than it has."""
    card, reserved = load.card, _reserved_bytes(load)
    demanded = load.min_bytes + reserved
    if demanded <= card.free:
        return
    parts = ", ".join(f"{demand.engine} {_describe(demand, card)}" for demand in load.on)
    parts += f", kept free {reserved / GIB:.1f}" if reserved else ""
    message = (
        f"{demanded / GIB:.1f} GiB are asked for on {card.device} ({card.name}), which has "
        f"{card.total / GIB:.1f} GiB, {card.free / GIB:.1f} of them free: {parts}."
    )
    if demanded > card.total:
        raise ConfigError(message, hint=_HINT)
    raise EngineUnavailable(message, retryable=True, hint=f"end what holds the card's memory; or {_HINT}")


def _reserved_bytes(load: _Load) -> int:
    """Return the bytes that must stay free on a card whose LLMs take all that is left, when it is checked for room.

    That is a share of `KEPT_FREE` (8 %) of the card; 0 if the card has one engine only, or no LLM that takes the rest.
    """
    shares = len(load.on) > 1 and any(_takes_what_is_left(demand) for demand in load.on)
    return math.ceil(KEPT_FREE * load.card.total) if shares else 0


def _takes_what_is_left(demand: Demand) -> bool:
    """Return True for an engine that takes all it may (an LLM) and whose share the user has not set."""
    return demand.fills and demand.share is None


def _describe(demand: Demand, card: Card) -> str:
    reason = "its weights" if demand.share is None else f"gpu_memory_utilization {demand.share:g}"
    return f"{demand.min_bytes(card) / GIB:.1f} ({reason})"


def _grant(demand: Demand, loads: Sequence[_Load]) -> Grant:
    """Return the device and the share of memory of an engine whose cards are chosen.

    An LLM that shares its cards with others gets what it needs and an equal part of what is left.
    """
    if not loads:
        return Grant(normalize(demand.device) or ("" if demand.fills else "cpu"))
    device = "cuda:" + ",".join(str(load.card.index) for load in loads)
    if not _takes_what_is_left(demand) or all(len(load.on) == 1 for load in loads):
        return Grant(device, demand.share)
    return Grant(device, _floor(min(_open_share(load, demand) for load in loads)))


def _open_share(load: _Load, demand: Demand) -> float:
    """Return the share of an LLM without one: what it needs, and its part of what is left.

    The share is a number from 0 to 1 of the card's total memory, at most `1 - KEPT_FREE`. LLMs without a share on one
    card divide the rest equally.
    """
    card, fillers = load.card, [one for one in load.on if _takes_what_is_left(one)]
    spare = max(0.0, load.spare - KEPT_FREE * card.total) / len(fillers)
    return min(1 - KEPT_FREE, (demand.needs + spare) / card.total)


def _floor(share: float) -> float:
    """Round a share down to three places, with a tolerance for rounding errors."""
    return math.floor(share * 1000 + 1e-6) / 1000


def share_of(gpus: float) -> float | None:
    """Return the share of a card's memory for a part of a GPU (Ray's `num_gpus`); None for whole GPUs."""
    return _floor(gpus * (1 - KEPT_FREE)) if 0 < gpus < 1 else None


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _listed(loads: Iterable[_Load]) -> str:
    return ", ".join(str(load.card) for load in loads)
