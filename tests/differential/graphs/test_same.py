"""The plain graph and the accelerated one on the same input, in every way to call a graph: nothing differs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from differential.graphs.seen import Seen, differences, ways_of
from differential.graphs.sides import Side
from support.graphs import GRAPHS

CORE = ("invoke", "ainvoke", "stream all subgraphs")
SHARE = 1
"""Of the other ways so many for each graph; all of them in `make test-all`."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:astream_events version='v1' is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This API is in beta"),  # as_tool
    pytest.mark.filterwarnings("ignore:The v3 streaming protocol on Pregel is experimental"),
]


def _chosen() -> Iterator[tuple[str, str]]:
    for at, (name, case) in enumerate(GRAPHS.items()):
        ways = ways_of(case)
        others = [way for way in ways if way not in CORE]
        turn = {others[(SHARE * at + i) % len(others)] for i in range(SHARE)}
        yield from ((name, way) for way in ways if way in CORE or way in turn)


@pytest.mark.parametrize(("name", "way"), list(_chosen()))
def test_same(name: str, way: str, plainly: Side, sooner: Side) -> None:
    case = GRAPHS[name]
    assert not differences(plainly.see(case, way), sooner.see(case, way), case)


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_same_in_every_way(name: str, plainly: Side, sooner: Side) -> None:
    case = GRAPHS[name]
    found = {way: differences(plainly.see(case, way), sooner.see(case, way), case) for way in ways_of(case)}
    assert not {way: how for way, how in found.items() if how}


RESUMED = [name for name, case in GRAPHS.items() if len(case.turns) > 1 and case.is_graph and case.only != "async"]
HALF = [(name, ("plain", "accelerated")[at % 2]) for at, name in enumerate(RESUMED)]
REST = [(name, ("accelerated", "plain")[at % 2]) for at, name in enumerate(RESUMED)]


@pytest.mark.parametrize(("name", "first"), [*HALF, *(pytest.param(*one, marks=pytest.mark.long) for one in REST)])
def test_one_resumes_what_the_other_began(name: str, first: str, plainly: Side, sooner: Side) -> None:
    """Turn by turn the other graph: each reads the other's checkpoints, pending writes, caches and stores."""
    case, way = GRAPHS[name], "invoke" if GRAPHS[name].only == "sync" or len(name) % 2 else "ainvoke"
    kit = sooner.kit()
    two = [case.build(kit), sooner.fast(case.build(kit))]
    crossed = sooner.see(case, way, two if first == "plain" else two[::-1], kit)
    assert not differences(plainly.see(case, way), crossed, case)


def test_every_run_of_a_plain_graph_is_the_same(plainly: Side) -> None:
    """What is compared is no matter of chance: else the other tests would say nothing."""
    seen: list[Seen] = [plainly.see(GRAPHS["corrective_rag"], "stream all subgraphs") for _ in range(2)]
    assert not differences(*seen, GRAPHS["corrective_rag"])
