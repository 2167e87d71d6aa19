"""Tests that circles of modules which import each other stay small."""

from __future__ import annotations

import grimp

LARGEST = 3


def circles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """Return the sets of two or more modules that import each other, directly or indirectly."""
    found = ({m, *(graph.find_upstream_modules(m) & graph.find_downstream_modules(m))} for m in graph.modules)
    return {frozenset(circle) for circle in found if len(circle) > 1}


def test_no_circle_has_more_than_three_modules() -> None:
    """Imports for type checking are counted."""
    large = {circle for circle in circles(grimp.build_graph("teola_plugin", cache_dir=None)) if len(circle) > LARGEST}
    assert not large, "\n".join(", ".join(sorted(circle)) for circle in large)


def test_import_circles_are_detected() -> None:
    graph = grimp.ImportGraph()
    for line in ("a b", "b c", "c a", "a d", "d e", "e d", "f a"):
        importer, imported = line.split()
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == {frozenset("abc"), frozenset("de")}
