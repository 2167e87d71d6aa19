"""Positions in a drawing: lanes of a timeline, layers of a graph. Pure geometry, no drawing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from teola_plugin.observe.spans import GraphView


def pack_lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane number for each (begin, end), such that intervals of one lane never overlap.

    Uses the fewest lanes possible. Intervals that only touch share a lane.
    """
    lanes = [0] * len(intervals)
    free: list[int] = []
    running: list[tuple[float, int]] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        begin, end = intervals[i]
        while running and running[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(running)[1])
        lanes[i] = heapq.heappop(free) if free else len(running)
        heapq.heappush(running, (max(begin, end), lanes[i]))
    return lanes


@dataclass(frozen=True, slots=True)
class Layered:
    """A layered drawing. A position is (layer from the left, y of the middle), y in units of one node's height."""

    positions: Mapping[str, tuple[int, float]]
    routes: Mapping[tuple[str, str], tuple[tuple[int, float], ...]]
    """For each edge, its positions, both ends included; one in every layer that it crosses."""
    layers: int
    height: float


def layered(view: GraphView) -> Layered:
    """Lay out primitives by depth, the deepest at the left; edges run between nodes, never across them.

    Sugiyama's method: invisible points stand where a long edge crosses a layer, layers are ordered by the barycentre of
    their neighbours, and each layer is then moved as close to its neighbours as its order and the spacing allow.
    """
    layer_of = _layers(view)
    distinct = dict.fromkeys((a, b) for a, b, _ in view.edges if a in layer_of and b in layer_of)
    edges = [(a, b) for a, b in distinct if layer_of[a] < layer_of[b]]
    chains = {edge: _chain(edge, layer_of) for edge in edges}
    rows: list[list[str]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    for node, layer in layer_of.items():
        rows[layer].append(node)
    links: dict[str, list[str]] = {}
    for (source, _), chain in chains.items():
        for offset, point in enumerate(chain[1:-1], start=1):
            rows[layer_of[source] + offset].append(point)
        for a, b in pairwise(chain):
            links.setdefault(a, []).append(b)
            links.setdefault(b, []).append(a)
    where = {point: layer for layer, row in enumerate(rows) for point in row}
    rows = _ordered(rows, links, where)
    y = _straightened(rows, links, where, frozenset(layer_of))
    top = min(y.values(), default=0.0)
    y = {point: value - top for point, value in y.items()}
    return Layered(
        {node: (layer, y[node]) for node, layer in layer_of.items()},
        {edge: tuple((where[point], y[point]) for point in chain) for edge, chain in chains.items()},
        len(rows),
        max(y.values(), default=0.0),
    )


def _layers(view: GraphView) -> dict[str, int]:
    """Return the layer of each node, by the recorded depths, or by its longest path if an edge contradicts them."""
    depth = {node[0]: node[3] for node in view.nodes}
    edges = [(a, b) for a, b, _ in view.edges if a in depth and b in depth and a != b]
    if any(depth[a] <= depth[b] for a, b in edges):
        depth = dict.fromkeys(depth, 0)
        for _ in depth:  # at most one round a node: ends even if the data has a cycle
            before = dict(depth)
            for a, b in edges:
                depth[a] = max(depth[a], min(depth[b] + 1, len(depth) - 1))
            if depth == before:
                break
    used = {value: rank for rank, value in enumerate(sorted(set(depth.values()), reverse=True))}
    return {node: used[value] for node, value in depth.items()}


def _chain(edge: tuple[str, str], layer_of: Mapping[str, int]) -> list[str]:
    """Return the nodes of an edge that crosses layers: its source, a placeholder in each layer between, and its target.

    A placeholder's name begins with a null character, so that no primitive has the same one.
    """
    source, target = edge
    crossed = range(layer_of[source] + 1, layer_of[target])
    return [source, *(f"\0{source}\0{target}\0{layer}" for layer in crossed), target]


def _ordered(rows: list[list[str]], links: Mapping[str, list[str]], where: Mapping[str, int]) -> list[list[str]]:
    """Return the order with the fewest crossings that was found by sweeping to and fro."""
    best, fewest = rows, _crossings(rows, links, where)
    for sweep in range(12):
        if not fewest:
            break
        forward = sweep % 2 == 0
        rows = [list(row) for row in rows]
        for layer in range(len(rows)) if forward else range(len(rows) - 1, -1, -1):
            neighbour = layer - 1 if forward else layer + 1
            if 0 <= neighbour < len(rows):
                at = {point: float(i) for i, point in enumerate(rows[neighbour])}
                mean = {p: _mean((at[q] for q in links.get(p, ()) if q in at), i) for i, p in enumerate(rows[layer])}
                rows[layer].sort(key=mean.__getitem__)
        crossings = _crossings(rows, links, where)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _crossings(rows: Iterable[list[str]], links: Mapping[str, list[str]], where: Mapping[str, int]) -> int:
    """Return how many pairs of edges cross between neighbouring layers, whose points are in the order of `rows`."""
    at = {point: i for row in rows for i, point in enumerate(row)}
    count = 0
    for layer, row in enumerate(rows):
        ends = [at[q] for p in row for q in sorted(links.get(p, ()), key=at.__getitem__) if where[q] == layer + 1]
        count += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return count


def _straightened(
    rows: list[list[str]], links: Mapping[str, list[str]], where: Mapping[str, int], nodes: frozenset[str]
) -> dict[str, float]:
    """Return heights: in a few sweeps, each point comes as near to its neighbours as the spacing allows."""
    gaps = [[0.0, *(_gap(a in nodes, b in nodes) for a, b in pairwise(row))] for row in rows]
    y: dict[str, float] = {}
    for row, gap in zip(rows, gaps, strict=True):
        at = 0.0
        for point, space in zip(row, gap, strict=True):
            at += space
            y[point] = at
        y.update({point: y[point] - at / 2 for point in row})
    for sweep in range(16):
        forward = sweep % 2 == 0
        last = sweep >= 10  # in the end neighbours on both sides count
        for layer in range(len(rows)) if forward else range(len(rows) - 1, -1, -1):
            targets = []
            for point in rows[layer]:
                near = [q for q in links.get(point, ()) if last or (where[q] < layer) == forward]
                # What the eye follows should be straight: chains of nodes, and long edges over several layers.
                heavy = [q for q in near for _ in range(6 if (q in nodes) == (point in nodes) else 1)]
                targets.append(_mean((y[q] for q in heavy), y[point]))
            y.update(zip(rows[layer], _spaced(targets, gaps[layer]), strict=True))
    return y


def _gap(a_is_node: bool, b_is_node: bool) -> float:
    return (1.42, 0.9, 0.42)[(not a_is_node) + (not b_is_node)]


def _spaced(targets: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return the heights nearest to `targets` (least squares), in the same order and at least `gaps` apart."""
    offsets, total = [], 0.0
    for gap in gaps:
        total += gap
        offsets.append(total)
    blocks: list[tuple[float, int]] = []  # (mean, length): pool adjacent violators
    for target, offset in zip(targets, offsets, strict=True):
        mean, length = target - offset, 1
        while blocks and blocks[-1][0] >= mean:
            before, count = blocks.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        blocks.append((mean, length))
    flat = [mean for mean, length in blocks for _ in range(length)]
    return [mean + offset for mean, offset in zip(flat, offsets, strict=True)]


def _mean(values: Iterable[float], default: float) -> float:
    values = list(values)
    return sum(values) / len(values) if values else default
