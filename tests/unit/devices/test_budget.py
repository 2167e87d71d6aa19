"""Tests of `engines.devices.budget`: which engine computes on which GPU, and how much memory each may take."""

from __future__ import annotations

import pytest

from teola_plugin.engines.devices.budget import KEPT_FREE, Demand, Grant, allot, share_of
from teola_plugin.engines.devices.cards import GIB, Card
from teola_plugin.errors import ConfigError, EngineUnavailable


def card(index: int = 0, free: float = 80, total: float = 80) -> Card:
    return Card(index, "Card", int(total * GIB), int(free * GIB))


def llm(name: str = "llm", share: float | None = None, needs: float = 0, cards: int = 1) -> Demand:
    return Demand(name, cards=cards, share=share, needs=int(needs * GIB), fills=True)


def small(name: str = "embedder", takes: float = 4, device: str = "", share: float | None = None) -> Demand:
    """Return an engine whose weights take half of its memory."""
    return Demand(name, device, share=share, needs=int(takes * GIB / 2), work=int(takes * GIB / 2))


ONE, TWO = [card()], [card(0), card(1)]
G = Grant


@pytest.mark.parametrize(
    ("cards", "demands", "grants"),
    [
        # one card: who said nothing is on it
        (ONE, [small()], [G("cuda:0")]),
        (ONE, [small(device="cpu")], [G("cpu")]),
        (ONE, [small(device="cuda")], [G("cuda:0")]),
        (ONE, [small(device="mps")], [G("mps:0")]),
        # no card has room for what said nothing
        ([card(0, 3), card(1, 5)], [small()], [G("cuda:1")]),
        ([card(0, 3), card(1, 3)], [small()], [G("cpu")]),
        # no card
        ([], [small(), llm()], [G("cpu"), G("")]),
        # an LLM that is alone keeps vLLM's own default; beside others it gets what they leave, less 6.4 GiB
        (ONE, [llm()], [G("cuda:0")]),
        (ONE, [llm(), small(device="cpu")], [G("cuda:0"), G("cpu")]),
        (ONE, [llm(), small()], [G("cuda:0", 0.87), G("cuda:0")]),
        (ONE, [llm(), small(), small("reranker", 6)], [G("cuda:0", 0.795), G("cuda:0"), G("cuda:0")]),
        ([card(free=40)], [llm(), small()], [G("cuda:0", 0.37), G("cuda:0")]),
        # what was said holds
        (ONE, [llm(share=0.5), small()], [G("cuda:0", 0.5), G("cuda:0")]),
        (ONE, [llm(share=0.95), small()], [G("cuda:0", 0.95), G("cuda:0")]),
        (ONE, [llm(), small(share=0.25)], [G("cuda:0", 0.67), G("cuda:0", 0.25)]),
        # room to work stops nobody: the LLM that said nothing does with less
        (ONE, [llm(share=0.95), small(takes=8)], [G("cuda:0", 0.95), G("cuda:0")]),
        (ONE, [llm(needs=68), small(takes=10)], [G("cuda:0", 0.85), G("cuda:0")]),
        # two LLMs
        (ONE, [llm("a"), llm("b"), small()], [G("cuda:0", 0.435), G("cuda:0", 0.435), G("cuda:0")]),
        (ONE, [llm("a", share=0.5), llm("b")], [G("cuda:0", 0.5), G("cuda:0", 0.42)]),
        (ONE, [llm("a", needs=40), llm("b", needs=10)], [G("cuda:0", 0.647), G("cuda:0", 0.272)]),
        # two cards: the one with room, and not the LLM's
        ([card(0, 10), card(1, 60)], [small()], [G("cuda:1")]),
        (TWO, [llm(), small(), small("reranker")], [G("cuda:0"), G("cuda:1"), G("cuda:1")]),
        (TWO, [small("a"), small("b")], [G("cuda:0"), G("cuda:1")]),
        (TWO, [llm("a"), llm("b")], [G("cuda:0"), G("cuda:1")]),
        (TWO, [llm(), small(device="cuda:0")], [G("cuda:1"), G("cuda:0")]),
        ([card(0, 30), card(1, 60)], [llm()], [G("cuda:1")]),
        # an LLM on both cards: the same share on each, as much as the fuller one has
        (TWO, [llm(cards=2)], [G("cuda:0,1")]),
        (TWO, [llm(cards=2), small()], [G("cuda:0,1", 0.87), G("cuda:0")]),
        ([card(0, 80), card(1, 60)], [llm(cards=2), small()], [G("cuda:0,1", 0.67), G("cuda:0")]),
    ],
)
def test_allot_returns_the_expected_grant_for_each_demand(
    cards: list[Card], demands: list[Demand], grants: list[Grant]
) -> None:
    assert list(allot(demands, cards)) == grants


@pytest.mark.parametrize(
    ("cards", "demands", "kind", "says"),
    [
        ([], [small(device="cuda")], ConfigError, ["embedder", "cuda:0", "no GPU", "torch is built without CUDA"]),
        (TWO, [small(device="cuda:2")], ConfigError, ["cuda:2", "are 2", "cuda:0 (Card, 80.0 of 80.0 GiB free)"]),
        (ONE, [small(device="cuda:GPU-1a")], ConfigError, ["cuda:GPU-1a", "is 1"]),
        (TWO, [llm(cards=4), small()], ConfigError, ["llm asks for 4 GPUs", "are 2"]),
        # 76 + 2 + 3 GiB
        (
            ONE,
            [llm(share=0.95), small(), small("reranker", 6)],
            ConfigError,
            ["81.0 GiB", "llm 76.0 (gpu_memory_utilization 0.95)", "embedder 2.0 (its weights)", "reranker 3.0"],
        ),
        (ONE, [small(takes=180, device="cuda")], ConfigError, ["90.0 GiB", "80.0 GiB, 80.0 of them free"]),
        (ONE, [llm(needs=72), small()], ConfigError, ["80.4 GiB", "llm 72.0 (its weights)", "kept free 6.4"]),
        (ONE, [llm("a", share=0.6), llm("b", share=0.5)], ConfigError, ["a 48.0", "b 40.0"]),
        # it would fit, were nobody else there
        ([card(free=30)], [llm(share=0.5), small()], EngineUnavailable, ["42.0 GiB", "30.0 of them free"]),
    ],
)
def test_demand_that_does_not_fit_raises_error_with_figures(
    cards: list[Card], demands: list[Demand], kind: type[Exception], says: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        allot(demands, cards, "torch is built without CUDA")
    assert all(part in str(caught.value) for part in says), str(caught.value)
    assert caught.value.hint  # type: ignore[attr-defined]


def test_order_of_demands_does_not_change_the_grants() -> None:
    demands = [llm(), small(), small("reranker", 6), small("fixed", 2, device="cuda:1")]
    forth = allot(demands, TWO)
    assert allot(demands[::-1], TWO) == forth[::-1]


@pytest.mark.parametrize(("gpus", "share"), [(0, None), (1, None), (2, None), (0.5, 0.46), (0.25, 0.23)])
def test_fractional_gpus_become_shares_of_gpu_memory(gpus: float, share: float | None) -> None:
    assert share_of(gpus) == share
    if share is not None:
        assert share / gpus == pytest.approx(1 - KEPT_FREE, abs=0.01), "together they leave what one would"
