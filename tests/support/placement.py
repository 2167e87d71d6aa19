"""Requests for tests of placement. Prefilling takes 1 ms a token, and a block has 16 tokens."""

from __future__ import annotations

from collections.abc import Callable

from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind
from teola_plugin.scheduling import E2, E2Options, block_hashes
from teola_plugin.scheduling.placement import PlacementChoice, PlacementRequest, PlacementRule

PROFILE = EngineProfile({PrimitiveKind.PREFILLING: Curve.linear(0.0, 0.001)}, prefix_caching=True)


PREBLE = E2Options()


def e2(*replicas: str, options: E2Options = PREBLE) -> E2:
    placement = E2(PROFILE, options)
    for name in replicas or ("a", "b"):
        placement.add_replica(name)
    placement.begin_round(0.0)
    return placement


def prompt(*parts: tuple[str, int]) -> list[int]:
    """Return the tokens of a prompt. A part `(name, n)` is n tokens that depend on the name."""
    return [ord(name) for name, count in parts for _ in range(count)]


def ask(name: str, *parts: tuple[str, int], **more: object) -> PlacementRequest:
    tokens = prompt(*parts)
    return PlacementRequest(name, len(tokens), block_hashes(tokens), **more)  # type: ignore[arg-type]


def anywhere(replica: str, units: int) -> bool:
    return True


def but(*full: str) -> Callable[[str, int], bool]:
    return lambda replica, units: replica not in full


def send(
    placement: E2, request: PlacementRequest, replica: str = "", units: int | None = None, *, prefilling: bool = False
) -> PlacementChoice:
    """Place a request, or send it to `replica`. Its first token comes at once, unless it stays `prefilling`."""
    choice = placement.choose_replica(request, anywhere)
    assert choice is not None
    if replica:
        choice = PlacementChoice(replica, request.size if units is None else units, PlacementRule.EXPLORE)
    placement.record_sent(request, choice)
    if not prefilling:
        placement.record_prefilled(0.0, request.id)
    return choice
