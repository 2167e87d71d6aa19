"""Whether a cluster has room for what engines reserve. Pure: what is asked for, what the nodes have.

Ray itself lets an actor wait for ever, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from teola_plugin.cluster.config import EngineConfig

Resources = Mapping[str, float]
GPU = "GPU"
_TRIES = 20_000
"""Ways to put instances on nodes that are tried before it is believed that they fit."""
_DEEPEST = 300
_NEARLY = 1e-9


@dataclass(frozen=True, slots=True)
class Ask:
    """Instances of one engine, and what each of them reserves on one node."""

    engine: str
    instances: int
    each: Resources

    @classmethod
    def of(cls, engine: str, config: EngineConfig, instances: int) -> Ask:
        asked = {"CPU": config.cpus, GPU: config.gpus, **config.resources}
        return cls(engine, instances, {name: amount for name, amount in asked.items() if amount > 0})

    def told(self, resource: str) -> str:
        return f"{self.engine} {self.instances} x {self.each[resource]:g}"


def shortage(asks: Sequence[Ask], nodes: Sequence[Resources]) -> str:
    """What is asked for and not there, with the figures, as a sentence without its end; empty if all of it fits."""
    asks = [ask for ask in asks if ask.instances and ask.each]
    return _one_is_too_large(asks, nodes) or _all_are_too_many(asks, nodes) or _do_not_pack(asks, nodes)


def _one_is_too_large(asks: Sequence[Ask], nodes: Sequence[Resources]) -> str:
    for ask in asks:
        if not any(all(_has(node, name, amount) for name, amount in ask.each.items()) for node in nodes):
            wanted = " and ".join(f"{amount:g} {name}" for name, amount in ask.each.items())
            return f"an instance of {ask.engine!r} asks for {wanted} on one node; {_listed(nodes, ask.each)}"
    return ""


def _has(node: Resources, name: str, amount: float) -> bool:
    return node.get(name, 0.0) >= amount - _NEARLY


def _all_are_too_many(asks: Sequence[Ask], nodes: Sequence[Resources]) -> str:
    for name in sorted({name for ask in asks for name in ask.each}, key=lambda name: (name != GPU, name)):
        some = [ask for ask in asks if name in ask.each]
        wanted, there = sum(ask.instances * ask.each[name] for ask in some), sum(node.get(name, 0.0) for node in nodes)
        if wanted > there + _NEARLY:
            return f"{wanted:g} {name} are asked for ({', '.join(ask.told(name) for ask in some)}), {there:g} are there"
    return ""


def _do_not_pack(asks: Sequence[Ask], nodes: Sequence[Resources]) -> str:
    if _Packing(asks).fits(tuple(_Node.of(node) for node in nodes)):
        return ""
    names = sorted({name for ask in asks for name in ask.each}, key=lambda name: (name != GPU, name))
    wanted = "; ".join(f"{name}: {', '.join(ask.told(name) for ask in asks if name in ask.each)}" for name in names)
    return f"the instances ({wanted}) do not fit on the nodes together; {_listed(nodes, names)}"


def _listed(nodes: Sequence[Resources], names: Iterable[str]) -> str:
    if not nodes:
        return "there are no nodes"
    return "the nodes have " + ", ".join(
        f"{name} " + "/".join(f"{node.get(name, 0.0):g}" for node in nodes) for name in names
    )


# ------------------------------------------------------------ putting instances on nodes


@dataclass(frozen=True, slots=True, order=True)
class _Node:
    """What is left of a node. A part of a GPU is a part of one card: three times 0.6 needs three cards."""

    cards: tuple[float, ...]
    rest: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, resources: Resources) -> _Node:
        whole, part = divmod(resources.get(GPU, 0.0), 1)
        cards = (1.0,) * int(whole) + ((part,) if part > _NEARLY else ())
        return cls(cards, tuple(sorted((name, amount) for name, amount in resources.items() if name != GPU)))

    def without(self, each: Resources) -> _Node | None:
        """What is left beside one more instance; None if it does not fit."""
        cards = _cards_without(self.cards, each.get(GPU, 0.0))
        rest = dict(self.rest)
        for name, amount in each.items():
            if name != GPU:
                rest[name] = rest.get(name, 0.0) - amount
        if cards is None or any(amount < -_NEARLY for amount in rest.values()):
            return None
        return _Node(cards, tuple(sorted(rest.items())))


def _cards_without(cards: tuple[float, ...], gpus: float) -> tuple[float, ...] | None:
    free = sorted(cards)
    if 0 < gpus < 1:
        for at, card in enumerate(free):  # the fullest on which it fits
            if card >= gpus - _NEARLY:
                free[at] = card - gpus
                return tuple(free)
        return None
    for _ in range(round(gpus)):
        if not free or free.pop() < 1 - _NEARLY:
            return None
    return tuple(free)


class _Packing:
    """Puts instances on nodes, the largest first, and goes back where it was wrong to."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        order = sorted(asks, key=lambda ask: (ask.each.get(GPU, 0.0), sum(ask.each.values())), reverse=True)
        self._each = [ask.each for ask in order for _ in range(ask.instances)]
        self._tries = 0

    def fits(self, nodes: tuple[_Node, ...], at: int = 0) -> bool:
        """Whether the instances from `at` on fit. True as well where that was not found out."""
        self._tries += 1
        if at == len(self._each) or self._tries > _TRIES or at > _DEEPEST:
            return True
        for number, node in _different(nodes):
            left = node.without(self._each[at])
            if left is not None and self.fits((*nodes[:number], left, *nodes[number + 1 :]), at + 1):
                return True
        return False


def _different(nodes: tuple[_Node, ...]) -> list[tuple[int, _Node]]:
    """The fullest first; of equal ones only one."""
    return sorted(((number, node) for node, number in {n: i for i, n in enumerate(nodes)}.items()), key=_fullness)


def _fullness(one: tuple[int, _Node]) -> tuple[float, float]:
    return sum(one[1].cards), sum(amount for _, amount in one[1].rest)
