"""Tests of a prompt that grows: the cost of following it, and how much of it is kept."""

from __future__ import annotations

from typing import Any, cast

from teola_plugin.graph import (
    Attributes,
    Graph,
    Growth,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Query,
    Ref,
    growths,
    named,
)
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.primitive_requests import MAX_TRUSTED, GrowingPrompt, IncrementalPrefilling
from teola_plugin.runtime.query_run import QueryRun, QueryStore
from teola_plugin.scheduling.live_query import LivePrimitive
from tests.support.steps import growth

K = PrimitiveKind
JOIN = Primitive("join", K.CALL, inputs=named(found=Ref("m")), call="join")
ASK = Primitive("p", K.PREFILLING, "llm", named(context=Ref("join")), prompt=(PromptPart.var("context"),))
GROWTH = Growth("m", ASK, (JOIN,), "context", 1)


class Run:
    """The parts of a live query that these tests need."""

    def __init__(self, tenant: str = "") -> None:
        self.id, self.query = "q", Query({}, tenant=tenant)
        self.growing = [GrowingPrompt(GROWTH, GROWTH)]
        self.store = QueryStore({})

    def calls_of(self, primitive: str) -> dict[str, Any]:
        return {}


class Followed:
    """Prompts that are followed while their lists are made; a text costs what it is made of."""

    def __init__(self) -> None:
        self.holder = LivePrimitive(Primitive("m", K.MAP), set())
        self.joined = 0
        self.started: list[str] = []
        self.prefixes = IncrementalPrefilling(
            lambda run, name: self.holder,
            self._compute,
            lambda run, p: self.started.append(p.id),
            lambda run, name: None,
            ClientCode(runs_inline=True),
        )

    def _compute(self, run: Any, p: Primitive, given: dict[str, Any]) -> str:
        self.joined += len(given["found"])
        return "\n".join(one for one in given["found"] if one)

    def query(self, items: int, tenant: str = "", *, right: bool = True, refused: frozenset[int] = frozenset()) -> int:
        """Run one query. Return how many prefixes it prefilled early. `refused` items are not kept."""
        run, before = Run(tenant), len(self.started)
        self.holder.speculative_outputs = []
        query_run = cast(QueryRun, run)
        for i in range(items):
            name = f"m[{i}]/d"
            self.holder.speculative_outputs.append(Ref(name))
            run.store.put(name, "" if i in refused else f"passage {i}, a few words long")
            self.prefixes.note_end(query_run, name)
            if run.growing[0].warmup:
                self.prefixes.note_end(query_run, run.growing[0].warmup)
        whole = [f"passage {i}, a few words long" for i in range(items) if i not in refused]
        run.store.put("join", "\n".join(whole if right else reversed(whole)))
        self.prefixes.note_dispatch(query_run, ASK)
        return len(self.started) - before


def test_growing_prompt_costs_linear_time_for_long_lists() -> None:
    one = Followed()
    one.query(50)
    few = one.joined
    one.query(800)
    assert one.joined - few < 16 * few * 1.5
    assert growth(Followed().query, 100) < 1.3


def test_short_list_is_prefilled_per_item_in_a_second_query() -> None:
    one = Followed()
    assert one.query(6) == 0
    assert one.query(6) >= 4


def test_refused_items_do_not_extend_the_prompt() -> None:
    one, refused = Followed(), frozenset({1, 2, 5})
    assert one.query(6, refused=refused) == 0
    assert one.query(6, refused=refused) == 3


def test_learned_prompts_are_not_shared_across_tenants() -> None:
    one = Followed()
    assert [one.query(6, "a"), one.query(6, "b"), one.query(6, "")] == [0, 0, 0]
    assert min(one.query(6, "a"), one.query(6, "b"), one.query(6, "")) > 0
    one.query(6, "a", right=False)
    assert one.query(6, "a") == 0 and one.query(6, "b") > 0


def test_learned_prompts_are_bounded_and_can_be_reset() -> None:
    one = Followed()
    for i in range(MAX_TRUSTED + 50):
        one.query(3, f"tenant {i}")
    assert len(one.prefixes._trusted) == MAX_TRUSTED
    assert one.query(6, f"tenant {MAX_TRUSTED + 49}") > 0
    one.prefixes.reset()
    assert one.query(6, f"tenant {MAX_TRUSTED + 49}") == 0


def test_learned_prompts_are_not_shared_across_pools() -> None:
    one, other = Followed(), Followed()
    one.query(6)
    assert one.query(6) > 0 and other.query(6) == 0


def test_growths_leaves_no_ancestor_sets_on_the_graph() -> None:
    marked = ASK.with_(attributes=Attributes(grows_with="m"))
    items = Primitive("m", K.CALL)
    graph = Graph([items, JOIN, marked], Ref("p"))
    assert [one.variable for one in growths(graph)] == ["context"]
    assert not {"bits", "above"} & vars(graph).keys()
