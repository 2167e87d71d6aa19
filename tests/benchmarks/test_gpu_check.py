"""Tests that the checks of `benchmarks.gpu_check` report what happens on the session's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import gpu_check
from benchmarks.llm import checks as llm_checks
from teola_plugin.requests.payloads import Generation, Prompt

if TYPE_CHECKING:
    from tests.conftest import SessionLlm


@pytest.mark.vllm
def test_split_prompts_agree_and_use_the_cache(session_llm: SessionLlm) -> None:
    found = session_llm.run(llm_checks.parity(session_llm.engine, 8, exact=True))
    assert found["passed"] and set(found["equal_to_plain_alone"].values()) == {8}


@pytest.mark.vllm
def test_split_that_changes_an_answer_is_counted(session_llm: SessionLlm, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong(self: llm_checks.Case, engine: object) -> Generation:
        return Generation("something else", cached_tokens=32)

    monkeypatch.setattr(llm_checks.Case, "split", wrong)
    found = session_llm.run(llm_checks.parity(session_llm.engine, 2, exact=True))
    assert not found["passed"] and found["equal_to_plain_alone"]["split_alone"] == 0


@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(set(llm_checks.FAULTS) - {"kill_and_restart"}))
def test_fault_checks_of_the_engine_pass(session_llm: SessionLlm, name: str) -> None:
    assert session_llm.run(llm_checks.FAULTS[name](session_llm.engine))["passed"]


@pytest.mark.vllm
def test_texts_of_timings_have_the_stated_token_count(session_llm: SessionLlm) -> None:
    payload = llm_checks.Generate(gpu_check.words(300), llm_checks.Sampling(max_tokens=1))
    seen = session_llm.run(llm_checks.ask(session_llm.engine, llm_checks.request(payload, llm_checks.tenant())))
    assert seen.value.prompt_tokens == 301  # with the start token
    assert isinstance(gpu_check.words(1), Prompt)


def test_failed_checks_are_named() -> None:
    found = {"tiny": {"start_s": 1.0, "parity": {"passed": True}, "reset": {"passed": False}, "times": {"a": 1}}}
    assert gpu_check.failures(found) == ["tiny.reset"]


def test_check_without_gpu_exits_with_a_message() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA GPU"):
        gpu_check.hardware(cpu=False)
