"""Tests of the table of requests: which caller gets which request, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from teola_plugin.graph import PrimitiveKind, RequestContext
from teola_plugin.requests.payloads import (
    UNKNOWN,
    Chunk,
    EmbedText,
    Generate,
    IngestRow,
    OneOf,
    Prompt,
    Request,
    Sampling,
    SearchVector,
    Version,
    Warmup,
)
from teola_plugin.runtime.claims import (
    OWN_GRAPH,
    Caller,
    ClaimRule,
    Claims,
    EngineFingerprint,
    PlannerGraph,
    request_key,
    rule_of,
)
from teola_plugin.runtime.engine_requests import EngineRequest, RequestState, RequestTable, more_urgent

ENGINE = EngineFingerprint("engine")
EARLY, PLAIN = Caller.PLANNER, Caller.ORIGINAL
REQUEST_CONTEXT = RequestContext("acme")


class Table:
    """A table, and works in it by name."""

    def __init__(self, kept: int = 256) -> None:
        self.table = RequestTable(kept)
        self.count = 0

    def join(
        self,
        party: Caller,
        payload: Any,
        query: str = "q",
        request_context: RequestContext = REQUEST_CONTEXT,
        graph: PlannerGraph = OWN_GRAPH,
    ) -> EngineRequest:
        self.count += 1
        request = Request(f"r{self.count}", PrimitiveKind.EMBEDDING, payload, query=query)
        known = request_key(ENGINE, request_context.tenant, payload)
        new = EngineRequest(
            request, "e", known, "p", Claims(rule_of(payload), party), request_context, RequestState.EXPECTED
        )
        work = self.table.join(query, known, party, request_context, lambda: new, graph)
        if party is EARLY:
            work.claims.add_graph(graph, lookahead=graph.lookahead, is_new=work.is_expected)
        if not (work.claims.rule is ClaimRule.WRITE and party is EARLY):
            work.note_sent()
        return work

    def end(self, work: EngineRequest, value: Any = "value", error: BaseException | None = None) -> None:
        self.table.end(work, value, error)


TEXT = EmbedText("a")
ASKED = Generate(Prompt(text="a"))


def row(text: str = "a", **metadata: Any) -> IngestRow:
    return IngestRow("c", Chunk("id", text, metadata), (1.0, 0.0))


def search(*wanted: tuple[str, Any], k: int = 4) -> SearchVector:
    return SearchVector("c", (1.0, 0.0), k, wanted)


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (search(("n", True)), search(("n", 1))),
        (search(("n", OneOf((1,)))), search(("n", OneOf((True,))))),
        (search(("n", OneOf((1,)))), search(("n", OneOf((1,), negated=True)))),
        (search(("n", OneOf((1,)))), search(("n", ((1,), False)))),
        (search(("n", 1)), search(("n", 1.0))),
        (search(("n", "1")), search(("n", 1))),
        (search(k=1), SearchVector("c", (1.0, 0.0), 2)),
        (search(), SearchVector("d", (1.0, 0.0))),
        (search(), SearchVector("c", (1.0, 1e-3))),
        (EmbedText("a"), EmbedText("a", "document")),
        (Generate(Prompt(text="a"), Sampling(seed=1)), Generate(Prompt(text="a"), Sampling(seed=True))),
        (row(), row("b")),
        (row(n=1), row(n=True)),
        (row(n={"deep": [1]}), row(n={"deep": [1.0]})),
        (row(), row(n=None)),
    ],
)
def test_payloads_an_engine_distinguishes_have_different_keys(one: Any, other: Any) -> None:
    found = [request_key(ENGINE, "", each) for each in (one, other)]
    assert None not in found and found[0] != found[1]


@pytest.mark.parametrize("payload", [TEXT, ASKED, row(n=1), search(("n", True))])
def test_equal_payloads_share_a_key_per_tenant_and_engine(payload: Any) -> None:
    again = type(payload)(**{name: getattr(payload, name) for name in payload.__dataclass_fields__})
    assert request_key(ENGINE, "acme", payload) == request_key(ENGINE, "acme", again)
    assert request_key(ENGINE, "acme", payload) != request_key(ENGINE, "other", payload)
    assert request_key(ENGINE, "acme", payload) != request_key(EngineFingerprint("engine", model="m"), "acme", payload)


@pytest.mark.parametrize("payload", [SearchVector("c", ("no", "numbers")), row(n={1, 2}), 42])  # type: ignore[arg-type]
def test_incomparable_payload_has_no_key(payload: Any) -> None:
    assert request_key(ENGINE, "", payload) is None


# ---------------------------------------------------------------- rules


def test_pure_request_is_claimed_any_number_of_times() -> None:
    made = Table()
    work = made.join(EARLY, TEXT)
    assert {made.join(party, TEXT) for party in (PLAIN, PLAIN, EARLY)} == {work}
    made.end(work)
    assert made.join(PLAIN, TEXT) is work and work.value == "value"


def test_a_generation_is_claimed_once_by_each_party() -> None:
    made = Table()
    early = made.join(EARLY, ASKED)
    assert made.join(PLAIN, ASKED) is early
    second = made.join(PLAIN, ASKED)
    assert second is not early, "two calls of one party stay two calls"
    made.end(second)
    assert made.join(EARLY, ASKED) is second, "the graph may come later than the plain object"
    assert made.join(EARLY, ASKED) not in (early, second)


def test_released_generation_is_not_claimed_by_the_same_party() -> None:
    made = Table()
    work = made.join(PLAIN, ASKED)
    assert work.claims.give_up(PLAIN), "nobody wants it"
    assert made.join(PLAIN, ASKED) is not work


def test_spare_request_is_claimed_by_one_later_graph() -> None:
    made = Table()
    work = made.join(EARLY, ASKED)
    work.claims.is_for_later_graph = True
    chosen = PlannerGraph("part1", "part1")
    assert made.join(EARLY, ASKED, graph=chosen) is work and not work.claims.is_for_later_graph
    assert made.join(EARLY, ASKED, graph=PlannerGraph("part2", "part2")) is not work, "it was made for one"


def planner_graph(number: int, round: str = "", since: int = 0) -> PlannerGraph:
    return PlannerGraph(f"part{number}", round or f"part{number}", True, since)


def test_each_lookahead_round_claims_a_request_once() -> None:
    made = Table()
    first = [made.join(EARLY, ASKED, graph=planner_graph(number, "one")) for number in range(3)]
    assert len({*map(id, first)}) == 3
    assert [made.join(EARLY, ASKED, graph=planner_graph(number, "two")) for number in range(3, 6)] == first
    assert made.join(EARLY, ASKED, graph=planner_graph(6, "two")) not in first
    assert [work.claims.graphs for work in first] == [{"part0", "part3"}, {"part1", "part4"}, {"part2", "part5"}]
    assert [made.join(PLAIN, ASKED) for _ in range(3)] == first


def test_subplan_skips_generations_claimed_before_it_began() -> None:
    made = Table()
    work = made.join(PLAIN, ASKED)
    work.claims.last_claim = 3
    assert made.join(EARLY, ASKED, graph=planner_graph(1, since=3)) is not work
    assert made.join(EARLY, ASKED, graph=planner_graph(2, since=2)) is work, "that part is late, no more"
    assert made.join(EARLY, TEXT, graph=planner_graph(2)) is made.join(EARLY, TEXT, graph=planner_graph(3, since=9)), (
        "but not if pure"
    )


def test_lookahead_subplan_does_not_claim_the_querys_own_request() -> None:
    made = Table()
    own = made.join(EARLY, ASKED)
    assert made.join(EARLY, ASKED, graph=planner_graph(1)) is not own


def test_warm_up_is_shared_by_graphs_but_not_the_original() -> None:
    made = Table()
    warm = Warmup(Prompt(text=f"a{UNKNOWN}b"))
    work = made.join(EARLY, warm)
    assert made.join(EARLY, Warmup(Prompt(text=f"a{UNKNOWN}c"))) is work, "of what is known"
    assert made.join(EARLY, Warmup(Prompt(text="ab"))) is not work and made.join(PLAIN, warm) is not work
    made.end(work)
    work.claims.remove_graph("")
    made.table.release("q", [work])
    assert made.join(EARLY, warm) is work, "it stays warm when its part is over"


def test_results_of_ended_subplans_are_released_beyond_a_limit() -> None:
    made = Table(kept=2)
    made.join(EARLY, EmbedText("of the query"))
    works = [made.join(EARLY, EmbedText(str(number)), graph=planner_graph(number)) for number in range(4)]
    for work in works:
        made.end(work)
        work.claims.remove_graph("part" + work.request.payload.text)
    made.table.release("q", works)
    assert [work.value for work in works] == [None, None, "value", "value"]
    assert len(list(made.table.of("q"))) == 1, "none of them is settled twice"


def test_expected_write_is_claimed_once_by_the_original() -> None:
    made = Table()
    waits = made.join(EARLY, row())
    assert waits.is_expected
    assert made.join(PLAIN, row("another")) is not waits
    assert made.join(PLAIN, row()) is waits and not waits.is_expected
    again = made.join(PLAIN, row())
    assert again is not waits, "the plain object writes once more"


def test_graph_claims_the_originals_write_unless_overwritten() -> None:
    made = Table()
    for overwritten in (False, True):
        work = made.join(PLAIN, row())
        made.end(work)
        if overwritten:
            made.table.drop_writes("e", "c")
        found = made.join(EARLY, row())
        assert (found is work) is not overwritten


def test_nothing_is_shared_across_queries_or_tenants() -> None:
    made = Table()
    work = made.join(EARLY, TEXT)
    assert made.join(PLAIN, TEXT, query="another") is not work
    assert made.join(PLAIN, TEXT, request_context=RequestContext("another")) is not work


@pytest.mark.parametrize("how", ["failed", "cancelled", "stale"])
def test_failed_cancelled_or_stale_request_is_never_claimed(how: str) -> None:
    made = Table()
    work = made.join(EARLY, TEXT)
    work.is_cancelled, work.search.is_outdated = how == "cancelled", how == "stale"
    if how == "failed":
        made.end(work, None, ValueError("no"))
    assert made.join(PLAIN, TEXT) is not work


# ---------------------------------------------------------------- terms, memory


def test_request_takes_the_most_urgent_terms_of_its_subscribers() -> None:
    one, other = (
        RequestContext("acme", deadline=5.0, weight=1.0, depth=1),
        RequestContext("acme", goal=2.0, weight=3.0, depth=4, gang="g"),
    )
    both = more_urgent(one, other)
    assert (both.deadline, both.goal, both.weight, both.depth, both.gang) == (5.0, 2.0, 3.0, 4, "g")
    assert more_urgent(one, one) is one


def test_table_claims_a_search_regardless_of_its_version() -> None:
    made = Table()
    work = made.join(EARLY, search())
    work.search.version = Version("c", 3)
    made.end(work, ())
    assert made.join(PLAIN, search()) is work, "whether that is still so is asked at the claim"


def test_oldest_results_of_the_original_are_released_first() -> None:
    made = Table(kept=2)
    early = made.join(EARLY, EmbedText("early"))
    made.end(early)
    works = [made.join(PLAIN, EmbedText(str(number))) for number in range(5)]
    for work in works:
        made.end(work)
    assert [work.value for work in works] == [None, None, None, "value", "value"]
    assert made.join(PLAIN, EmbedText("0")) is not works[0] and made.join(PLAIN, EmbedText("4")) is works[4]
    assert made.join(PLAIN, EmbedText("early")) is early


def test_generation_claimed_by_both_parties_releases_its_text() -> None:
    made = Table()
    work = made.join(EARLY, ASKED)
    made.join(PLAIN, ASKED)
    made.end(work)
    assert work.value is None and work.has_ended


def test_forgotten_query_leaves_no_requests() -> None:
    made = Table()
    made.join(EARLY, TEXT)
    made.table.forget("q")
    assert len(made.table) == 0 and list(made.table.of("q")) == []
