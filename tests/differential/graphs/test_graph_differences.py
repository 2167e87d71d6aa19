"""Tests that an accelerated graph behaves like the original in every way of calling it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from differential.graphs.seen import Seen, differences, ways_of
from differential.graphs.sides import Side
from support.graphs import GRAPHS

from teola_plugin import accelerate

CORE = ("ainvoke", "stream all subgraphs")
"""Each graph is called in one of these ways and in another one; in all ways in `make test-all`."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:astream_events version='v1' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This API is in beta"),  # as_tool
    pytest.mark.filterwarnings("ignore:The v3 streaming protocol on Pregel is experimental"),
]


def _cases_and_ways() -> Iterator[tuple[str, str]]:
    for at, (name, case) in enumerate(GRAPHS.items()):
        ways = ways_of(case)
        others = [way for way in ways if way not in CORE]
        core = [way for way in (*CORE[at % 2 :], *CORE) if way in ways]
        yield from ((name, way) for way in (core[0], others[at % len(others)]))


@pytest.mark.parametrize(("name", "way"), list(_cases_and_ways()))
def test_graph_behaves_as_the_original(name: str, way: str, original_side: Side, accelerated_side: Side) -> None:
    case = GRAPHS[name]
    assert not differences(original_side.see(case, way), accelerated_side.see(case, way), case)


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_graph_behaves_as_the_original_at_every_entry_point(
    name: str, original_side: Side, accelerated_side: Side
) -> None:
    case = GRAPHS[name]
    found = {
        way: differences(original_side.see(case, way), accelerated_side.see(case, way), case) for way in ways_of(case)
    }
    assert not {way: how for way, how in found.items() if how}


RESUMED = [name for name, case in GRAPHS.items() if len(case.turns) > 1 and case.is_graph and case.only != "async"]
HALF = [(name, ("plain", "accelerated")[at % 2]) for at, name in enumerate(RESUMED)]
REST = [(name, ("accelerated", "plain")[at % 2]) for at, name in enumerate(RESUMED)]


@pytest.mark.parametrize(("name", "first"), [*HALF, *(pytest.param(*one, marks=pytest.mark.long) for one in REST)])
def test_original_and_accelerated_graph_resume_each_other(
    name: str, first: str, original_side: Side, accelerated_side: Side
) -> None:
    """Turn by turn the other graph: each reads the other's checkpoints, pending writes, caches and stores."""
    case, way = GRAPHS[name], "invoke" if GRAPHS[name].only == "sync" or len(name) % 2 else "ainvoke"
    kit = accelerated_side.kit()
    two = [case.build(kit), accelerated_side.fast(case.build(kit))]
    crossed = accelerated_side.see(case, way, two if first == "plain" else two[::-1], kit)
    assert not differences(original_side.see(case, way), crossed, case)


OPTIONS: list[dict[str, Any]] = [{"passes": ()}, {"speculate": "off"}, {"speculate": "all"}, {"pool": None}]
"""Without a pool it is found in the nodes."""
SOME = ("agent_with_read_only_tools", "asks_in_a_subgraph", "corrective_rag", "map_reduce", "ways_to_ask")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", SOME)
def test_graph_with_other_options_behaves_as_the_original(
    name: str, options: dict[str, Any], original_side: Side, accelerated_side: Side
) -> None:
    case, kit = GRAPHS[name], accelerated_side.kit()
    fast = accelerate(case.build(kit), **{"pool": accelerated_side.pool, **options})
    seen = accelerated_side.see(case, "stream all", [fast], kit)
    assert not differences(original_side.see(case, "stream all"), seen, case)


def test_two_runs_of_the_original_graph_are_equal(original_side: Side) -> None:
    """If two runs of the original differed, the other tests would prove nothing."""
    seen: list[Seen] = [original_side.see(GRAPHS["corrective_rag"], "stream all subgraphs") for _ in range(2)]
    assert not differences(*seen, GRAPHS["corrective_rag"])
