"""Tests of the store of recent outputs: bounded, separate for each app and tenant, forgotten on request."""

from __future__ import annotations

from teola_plugin.engines.drafts.drafter import RecentOutputs

ONE, OTHER, ELSEWHERE = ("app", "a"), ("app", "b"), ("other", "a")


def drafts_of(kept: RecentOutputs, source: tuple[str, str], last: list[int]) -> list[int]:
    corpus = kept.of(source)
    if corpus is None:
        return []
    place, agreed = corpus.best(last)
    return corpus.continuation(place, 4) if agreed else []


def test_output_is_found_only_by_its_app_and_tenant() -> None:
    kept = RecentOutputs()
    kept.add(ONE, [1, 2, 3, 4])
    assert drafts_of(kept, ONE, [1, 2]) == [3, 4]
    assert drafts_of(kept, OTHER, [1, 2]) == drafts_of(kept, ELSEWHERE, [1, 2]) == []


def test_forget_drops_one_tenant_or_all() -> None:
    kept = RecentOutputs()
    for source in (ONE, OTHER, ELSEWHERE):
        kept.add(source, [1, 2, 3, 4])
    kept.forget("a")
    assert (
        drafts_of(kept, OTHER, [1, 2]) and not drafts_of(kept, ONE, [1, 2]) and not drafts_of(kept, ELSEWHERE, [1, 2])
    )
    kept.forget()
    assert kept.of(OTHER) is None


def test_oldest_outputs_are_evicted_first() -> None:
    kept = RecentOutputs(max_tokens=100)
    for start in range(0, 1000, 10):
        kept.add(ONE, list(range(start, start + 10)))
        corpus = kept.of(ONE)
        assert corpus is not None and len(corpus) <= 100
    assert drafts_of(kept, ONE, [990, 991]) == [992, 993, 994, 995]
    assert drafts_of(kept, ONE, [0, 1]) == []


def test_least_recently_writing_app_is_evicted_first() -> None:
    kept = RecentOutputs(max_sources=2)
    for source in (ONE, OTHER, ONE, ELSEWHERE):
        kept.add(source, [1, 2, 3, 4])
    assert kept.of(OTHER) is None and kept.of(ONE) is not None


def test_outputs_that_are_too_short_or_too_long_are_not_kept() -> None:
    kept = RecentOutputs(max_tokens=20)
    kept.add(ONE, [1, 2])
    kept.add(ONE, list(range(15)))
    assert kept.of(ONE) is None
