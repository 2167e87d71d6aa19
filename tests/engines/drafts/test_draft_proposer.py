"""Tests of the proposer with rows that join, leave, are preempted and move. They need no vLLM."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from teola_plugin.engines.drafts.draft_lengths import SHARES
from teola_plugin.engines.drafts.options import Drafts, drafts_of
from teola_plugin.engines.vllm.drafts.options import ENV
from teola_plugin.engines.vllm.drafts.proposer import DraftProposer
from teola_plugin.errors import TeolaError
from teola_plugin.shims.vllm import drafts as shim

PASSAGE = list(range(100, 160))
TEXT = "".join(map(chr, PASSAGE))
"""The same; a character's number is its token."""


class Batch:
    """Rows as vLLM's model runner keeps them."""

    def __init__(self, tokens: int = 8, **options: Any) -> None:
        self.requests: dict[str, Any] = {}
        self.rows: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.proposer = proposer(tokens, **options)
        runner = SimpleNamespace(requests=self.requests, input_batch=self)
        self.proposer.attach(shim.Runner(runner))

    @property
    def req_ids(self) -> list[str]:
        return self.rows

    def join(self, name: str, prompt: list[int], *, temperature: float = 0.0, **given: Any) -> None:
        params = SimpleNamespace(temperature=temperature, extra_args={"teola_drafts": given})
        self.requests[name] = SimpleNamespace(sampling_params=params, prompt_token_ids=list(prompt))
        self.tokens[name] = list(prompt)
        self.rows.append(name)

    def leave(self, name: str) -> None:
        self.rows.remove(name)
        del self.requests[name], self.tokens[name]

    def step(self, **new: list[int]) -> dict[str, list[int]]:
        """Return the drafts after each row has written these tokens."""
        for name, tokens in new.items():
            self.tokens[name] += tokens
        ids = np.zeros((len(self.rows), 300), dtype=np.int32)
        for i, name in enumerate(self.rows):
            ids[i, : len(self.tokens[name])] = self.tokens[name]
        lengths = np.array([len(self.tokens[name]) for name in self.rows])
        drafts = self.proposer.propose([new.get(name, []) for name in self.rows], lengths, ids, slot_mappings=None)
        return dict(zip(self.rows, drafts, strict=True))


def proposer(tokens: int, **options: Any) -> DraftProposer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV, json.dumps(options))
        patch.setattr(shim, "mend", lambda: None)
        patch.setattr(shim, "encoder", lambda config: lambda text: [ord(char) for char in text])
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
            model_config=SimpleNamespace(max_model_len=200),
        )
        return DraftProposer(config)


def test_row_copies_from_its_prompt() -> None:
    batch = Batch()
    batch.join("a", [1, *PASSAGE])
    assert batch.step(a=PASSAGE[:2]) == {"a": PASSAGE[2:6]}
    assert batch.step(a=PASSAGE[2:7]) == {"a": PASSAGE[7:15]}, "all was right: a longer one"


def test_text_of_request_is_drafted_from_its_first_token() -> None:
    batch = Batch()
    batch.join("a", [1, 2], texts=[TEXT])
    assert batch.step(a=PASSAGE[:1]) == {"a": PASSAGE[1:9]}


def test_sampled_rows_and_rows_without_output_get_no_draft() -> None:
    batch = Batch(budget=64)
    batch.join("a", [1, *PASSAGE], temperature=0.7)
    batch.join("b", [1, *PASSAGE])
    batch.join("c", [1, *PASSAGE])
    drafts = batch.step(a=PASSAGE[:2], b=PASSAGE[:2])
    assert drafts == {"a": [], "b": PASSAGE[2:6], "c": []}


def test_rows_keep_their_drafts_when_reordered() -> None:
    batch = Batch(budget=64)
    batch.join("a", [1, *PASSAGE])
    batch.join("b", [2, *reversed(PASSAGE)])
    batch.step(a=PASSAGE[:2], b=PASSAGE[::-1][:2])
    batch.rows.reverse()
    assert batch.step(a=PASSAGE[2:7], b=PASSAGE[::-1][2:7]) == {"a": PASSAGE[7:15], "b": PASSAGE[::-1][7:15]}


def test_preempted_row_resumes_drafting() -> None:
    batch = Batch()
    batch.join("a", [1, *PASSAGE])
    batch.step(a=PASSAGE[:2])
    batch.rows.remove("a")
    batch.step()
    batch.rows.append("a")
    batch.tokens["a"] += PASSAGE[2:4]  # written while nobody asked
    assert batch.step(a=PASSAGE[4:5])["a"][:3] == PASSAGE[5:8]


def test_proposer_without_runner_drafts_no_tokens() -> None:
    assert proposer(4).propose([[1], []], np.array([3, 2]), np.zeros((2, 4), dtype=np.int32)) == [[], []]


def test_draft_stops_at_the_models_maximum_length() -> None:
    batch = Batch()
    batch.join("a", [*range(98), *PASSAGE, 0, 1])
    batch.tokens["a"] += PASSAGE[:34]
    assert len(batch.tokens["a"]) == 194
    assert len(batch.step(a=PASSAGE[34:36])["a"]) == 3


@pytest.mark.parametrize(("rows", "each"), [(1, 4), (2, 4), (4, 2), (16, 0)])
def test_token_budget_is_shared_between_rows(rows: int, each: int) -> None:
    """Four tokens at first, eight of all rows: nothing where not even one a row is left."""
    batch = Batch(budget=8)
    for row in range(rows):
        batch.join(f"r{row}", [1, *PASSAGE])
    drafts = batch.step(**{f"r{row}": PASSAGE[:2] for row in range(rows)})
    assert {len(draft) for draft in drafts.values()} == {each}


def test_outputs_of_an_app_are_drafted_until_forgotten() -> None:
    batch = Batch()
    batch.join("a", [1, 2], app="x", tenant="t")
    batch.step(a=PASSAGE[:20])
    batch.leave("a")
    for name, about in (("b", ("x", "t")), ("c", ("x", "u"))):
        batch.join(name, [1, 2], app=about[0], tenant=about[1])
        found = batch.step(**{name: PASSAGE[:2]})[name]
        assert found == (PASSAGE[2:6] if about == ("x", "t") else [])
        batch.leave(name)
    batch.proposer.forget("t")
    batch.join("d", [1, 2], app="x", tenant="t")
    assert batch.step(d=PASSAGE[:2])["d"] == []


@pytest.mark.parametrize(
    "given",
    [
        "sometimes",
        {"token": 3},
        {"tokens": 0},
        {"tokens": 65},
        {"budget": -1},
        {"tokens": "8"},
        {"recent": True},
        {"lookup": 1},
        True,
    ],
)
def test_invalid_draft_settings_raise_with_a_hint(given: Any) -> None:
    with pytest.raises(TeolaError) as raised:
        drafts_of(given)
    assert raised.value.hint


def test_draft_settings_are_parsed_from_yaml_values() -> None:
    assert drafts_of("off") is None and drafts_of(False) is None, "YAML reads `off` as false"
    assert drafts_of("auto") == Drafts() == drafts_of({})
    assert drafts_of({"tokens": 3}) == Drafts(tokens=3)


def test_forget_drops_outputs_of_running_and_ended_requests() -> None:
    batch = Batch()
    batch.join("a", [1, 2], app="x", tenant="t")
    batch.step(a=PASSAGE[:20])
    batch.leave("a")
    batch.join("b", [1, 2], app="x", tenant="t")
    assert batch.step(b=PASSAGE[:2])["b"] == PASSAGE[2:6]
    batch.proposer.forget("t")
    assert batch.step(b=PASSAGE[2:4])["b"] == []
    batch.leave("b")
    batch.join("c", [1, 2], app="x", tenant="t")
    assert batch.step(c=PASSAGE[:2])["c"] == [], "nor is what ran kept when it ends"


def test_prompt_lookup_can_be_disabled() -> None:
    batch = Batch(lookup=False)
    batch.join("a", [1, *PASSAGE])
    assert batch.step(a=PASSAGE[:2])["a"] == []


def test_draft_length_follows_the_number_of_rows() -> None:
    batch = Batch(tokens=16)
    batch.proposer.set_longest_drafts([(1, (16,) * SHARES), (4, (6,) * SHARES), (8, (0,) * SHARES)])
    batch.join("a", [1, *PASSAGE], texts=[TEXT])
    assert len(batch.step(a=PASSAGE[:1])["a"]) == 16
    for i in range(3):
        batch.join(f"b{i}", [i + 2, *PASSAGE], texts=[TEXT])
    written = {f"b{i}": PASSAGE[:1] for i in range(3)}
    assert set(map(len, batch.step(a=PASSAGE[1:18], **written).values())) == {6}
    for i in range(3, 6):
        batch.join(f"b{i}", [i + 2, *PASSAGE], texts=[TEXT])
    written = {f"b{i}": PASSAGE[1:2] if i < 3 else PASSAGE[:1] for i in range(6)}
    assert set(map(len, batch.step(a=PASSAGE[18:19], **written).values())) == {0}


def test_budget_of_user_overrides_draft_lengths() -> None:
    batch = Batch(budget=4)
    batch.proposer.set_longest_drafts([(1, (0,) * SHARES)])
    batch.join("a", [1, *PASSAGE], texts=[TEXT])
    assert len(batch.step(a=PASSAGE[:1])["a"]) == 4


def test_fixed_length_applies_to_every_greedy_row() -> None:
    batch = Batch()
    batch.proposer.set_longest_drafts([(1, (0,) * SHARES)])
    batch.join("a", [1, 2, 3])
    batch.join("b", [1, 2, 3], temperature=0.7)
    batch.proposer.fix_length(5)
    assert batch.step(a=[7], b=[7]) == {"a": [1, 2, 3, 1, 2], "b": []}
    batch.proposer.fix_length(None)
    assert batch.step(a=[8], b=[8]) == {"a": [], "b": []}


def test_only_steps_with_unchanged_row_count_are_timed() -> None:
    batch = Batch()
    batch.join("a", [1, 2, 3])
    batch.proposer.fix_length(2)
    for new in range(3):
        batch.step(a=[new])
    batch.join("b", [1, 2, 3])
    for new in range(3):
        batch.step(a=[new], b=[new])
    steps = batch.proposer.fix_length(None)
    assert [rows for rows, _ in steps] == [1, 1, 2, 2] and all(seconds > 0 for _, seconds in steps)
    batch.step(a=[1], b=[1])
    assert batch.proposer.fix_length(None) == []


class Clock:
    """A step takes one second, and looking for its drafts a twentieth of that."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.05
        return self.seconds


class Timed(Batch):
    """In which what drafting costs is weighed against what it brings."""

    def __init__(self, *, measured: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.clock = self.proposer._drafter._budget._clock = Clock()
        if measured:
            self.proposer.set_step_durations([(4, 0.8, [(0, 1.0), (16, 1.5)])])
        self._fresh = iter(range(1000, 100_000))
        for name in "ab":
            self.join(name, [ord(name), *PASSAGE])

    def step(self, **new: list[int]) -> dict[str, list[int]]:
        self.clock.seconds += 0.95
        return super().step(**new)

    def nothing(self, steps: int) -> int:
        """Run steps that repeat nothing. Return in how many of them row a was looked at."""
        looked, drafter = list[str](), self.proposer._drafter
        running, drafter.running = drafter.running, lambda name: looked.append(name) or running(name)  # type: ignore[func-returns-value, method-assign]
        for _ in range(steps):
            self.step(**{name: [next(self._fresh)] for name in self.rows})
            self.short()
        drafter.running = running  # type: ignore[method-assign]
        return looked.count("a")

    def short(self) -> None:
        """Forget what was written, so that rows do not get too long for a test."""
        for name in self.rows:
            if len(self.tokens[name]) > 290:
                self.leave(name)
                self.join(name, [ord(name), *PASSAGE])


@pytest.mark.parametrize("measured", [True, False])
def test_rows_without_matches_are_searched_rarely(measured: bool) -> None:
    """This also holds on a server, where nothing is measured."""
    batch = Timed(measured=measured)
    batch.nothing(60)
    batch.nothing(400)
    assert batch.nothing(100) <= 10


def test_copying_rows_draft_together_on_unmeasured_engine() -> None:
    batch, drafted = Timed(measured=False), 0
    for name in "cd":
        batch.join(name, [ord(name)], texts=[TEXT])
    for at in range(1, 20):
        found = batch.step(**{name: PASSAGE[at - 1 : at] for name in batch.rows})
        drafted += sum(map(len, found.values()))
    assert drafted > 20


def test_rows_with_a_budget_of_the_user_are_searched_more_often() -> None:
    batch = Timed(measured=False, budget=8)
    batch.nothing(460)
    assert batch.nothing(100) > 10


def test_tokens_of_skipped_steps_are_seen_by_the_next_search() -> None:
    batch = Timed()
    batch.nothing(60)
    drafts = [batch.step(a=[PASSAGE[i]], b=[5000 + i]) for i in range(len(PASSAGE) - 1)]
    assert any(one["a"] and one["a"][0] == PASSAGE[i + 1] for i, one in enumerate(drafts)), "it copies by now"
    row = batch.proposer._drafter._running["a"].row
    assert row is not None and row.output == batch.tokens["a"][1 + len(PASSAGE) : len(row)]


def test_new_request_is_searched_while_others_pause() -> None:
    batch = Timed()
    batch.nothing(60)
    assert batch.proposer._drafter.skip_step(["a", "b"]) and not batch.proposer._drafter.skip_step(["a", "b", "c"])
    batch.join("c", [7, 8], texts=[TEXT])
    drafts = batch.step(a=[3000], b=[3001], c=PASSAGE[:1])
    assert drafts == {"a": [], "b": [], "c": PASSAGE[1:2]}, "a short one first"


def test_row_left_alone_is_searched_at_once() -> None:
    batch = Timed()
    batch.nothing(60)
    batch.leave("b")
    batch.tokens["a"] = batch.tokens["a"][:100]
    batch.proposer._drafter.end("a")
    assert batch.step(a=PASSAGE[:2])["a"][:2] == PASSAGE[2:4]


def test_resting_row_is_skipped_until_its_next_search() -> None:
    """The row copies nothing. At its next search, the tokens written meanwhile are known."""
    batch = Batch()
    batch.join("a", PASSAGE[:20])
    drafter, searched = batch.proposer._drafter, list[int]()
    for i in range(120):
        if drafter.skip_step(["a"]):
            batch.tokens["a"].append(1000 + i)
        else:
            searched.append(i)
            assert batch.step(a=[1000 + i]) == {"a": []}
    assert searched[:4] == [0, 1, 2, 3] and len(searched) < 40 and searched[-1] > 100
    row = drafter._running["a"].row
    assert row is not None and row.output == batch.tokens["a"][20 : len(row)]
    assert not drafter.skip_step(["b"])


def test_skipped_steps_are_announced_by_pause() -> None:
    """Steps of several requests, and of one; what was not made of them, as the requests are others, did not pass."""
    batch = Timed()
    batch.nothing(60)
    drafter = batch.proposer._drafter
    steps = drafter.pause(["a", "b"])
    assert steps > 1 and not drafter.skip_step(["a", "b"]) and drafter.pause(["a", "b"]) == 0
    drafter.resume(steps - 1)
    assert drafter.pause(["b", "a"]) == 0 and drafter.pause(["a", "b"]) == steps - 1
    drafter.resume(1)
    assert drafter.skip_step(["a", "b"]) and not drafter.skip_step(["a", "b"])


def test_pause_skips_steps_of_a_single_sampled_request() -> None:
    batch = Batch()
    batch.join("a", PASSAGE, temperature=0.7)
    batch.step(a=[1])
    assert batch.proposer.pause() == 64 and batch.proposer.pause() == 0
    assert proposer(4).pause() == 0, "without a runner"


def test_pause_skips_no_steps_while_measuring() -> None:
    batch = Batch()
    batch.join("a", PASSAGE, temperature=0.7)
    batch.step(a=[1])
    batch.proposer.fix_length(0)
    assert batch.proposer.pause() == 0


def test_single_sampled_request_is_skipped_for_64_steps() -> None:
    batch = Batch()
    batch.join("a", PASSAGE, temperature=0.7)
    batch.step(a=[1])
    drafter = batch.proposer._drafter
    assert all(drafter.skip_step(["a"]) for _ in range(64)) and not drafter.skip_step(["a"])


def test_skipped_steps_of_several_rows_are_timed() -> None:
    drafter = proposer(4)._drafter
    drafter.fix_length(0)
    assert all(drafter.skip_step(["a", "b"]) for _ in range(3)) and not drafter.skip_step(["a"])
    steps = drafter.fix_length(None)
    assert [rows for rows, _ in steps] == [2, 2] and all(seconds >= 0 for _, seconds in steps)
    assert not drafter.skip_step(["a", "b"])
