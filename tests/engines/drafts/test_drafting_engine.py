"""Tests of a `VllmEngine` that drafts: its measurements, what it forgets, and which settings exclude drafts."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from teola_plugin import EnginePool
from teola_plugin.engines.bundled import llama
from teola_plugin.engines.vllm import VllmEngine, host
from teola_plugin.engines.vllm.drafts.options import ENV
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.graph import GAP, PrimitiveKind
from teola_plugin.requests.draft_texts import forms_of_list, texts_of
from teola_plugin.requests.payloads import Done, Failed, Generate, Generation, Prompt, Request, Sampling

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

pytestmark = pytest.mark.vllm
K = PrimitiveKind


def written(llm: SessionLlm, text: str, **about: Any) -> Generation:
    async def run() -> Generation:
        payload = Generate(Prompt(text=text), Sampling(max_tokens=48, ignore_eos=True))
        async for result in llm.engine.execute([Request("r", K.PREFILLING, payload, **about)]):
            if isinstance(result, Failed):
                raise result.error
            if isinstance(result, Done):
                assert isinstance(result.value, Generation)
                return result.value
        raise AssertionError(text)

    return llm.run(run())


def test_generation_reports_drafted_and_accepted_tokens(session_llm: SessionLlm) -> None:
    plain = written(session_llm, "a text with nothing before it")
    again = written(session_llm, "a text with nothing before it", drafts=(plain.text,))
    assert again == plain
    assert again.drafted >= again.accepted > 0
    assert session_llm.engine.profile.drafts == 16


def test_outputs_of_a_tenant_are_drafted_for_its_app_until_forgotten(session_llm: SessionLlm) -> None:
    llm, about = session_llm, {"app": "a", "tenant": "forgotten"}

    def accepted(words: str, **more: Any) -> int:
        return written(llm, words, **{**about, **more}).accepted

    llm.run(llm.engine.reset())
    first = accepted("the seven words of which it is made")
    known = accepted("the seven words of which it is made")
    assert known > first, "it was written before"
    assert accepted("the seven words of which it is made", tenant="another") == first
    llm.run(llm.engine.forget("forgotten"))
    assert accepted("the seven words of which it is made") == first
    llm.run(llm.engine.reset())
    assert accepted("the seven words of which it is made") == first


def test_measuring_fills_verification_curves(session_llm: SessionLlm) -> None:
    profile = session_llm.run(session_llm.engine.measure())
    assert set(profile.verifying) <= {1, 4, 16} and 1 in profile.verifying
    assert all(seconds > 0 for curve in profile.verifying.values() for _, seconds in curve.points)
    again = written(session_llm, "and then it drafts as ever", drafts=("something else",))
    assert again.completion_tokens == 48


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_config": None},
        {"worker_extension_cls": "a.B"},
        {"async_scheduling": True},
        {"logits_processors": ["a:B"]},
        {"watermark_config": {"a": 1}},
    ],
    ids=str,
)
def test_conflicting_engine_arguments_disable_drafts_with_a_warning(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        engine = VllmEngine("llm", "model", engine_args=given, drafts="auto")
    assert engine._setup.drafts is None
    [line] = caplog.messages
    assert line.startswith("llm: ") and next(iter(given)) in line and "nothing is drafted" in line
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        caplog.clear()
        VllmEngine("llm", "model", engine_args=given, drafts="off")
    assert not caplog.messages


def test_pool_passes_draft_settings_to_its_engine() -> None:
    engine: Any = EnginePool.local(llm="some/model", drafts={"tokens": 3}).engine("llm")
    assert engine._setup.drafts.tokens == 3 and engine._setup.drafts_on_cuda
    with pytest.raises(TeolaError, match="tokens is 0"):
        EnginePool.local(llm="some/model", drafts={"tokens": 0})
    with pytest.raises(RegistrationError, match="say them of the engine") as raised:
        EnginePool.local(llm=VllmEngine("llm", "model"), drafts="auto")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("setting", "cpu", "drafted"),
    [("auto", True, True), ("auto", False, False), ({}, False, True), ("off", True, False)],
)
def test_auto_drafts_on_the_cpu_alone(setting: Any, cpu: bool, drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.drafts_shim, "lacking", lambda: ())
    monkeypatch.setattr(host.drafts_shim, "arguments", lambda tokens, *names: {"speculative_config": tokens})
    monkeypatch.setenv(ENV, "")
    platform = host.shim.Platform(cpu, "cpu" if cpu else "cuda")
    setup = VllmEngine("llm", "model", drafts=setting)._setup
    assert ("speculative_config" in host._arguments(setup, platform, {})) == drafted


def decoded(llm: SessionLlm, payload: Generate, *drafts: str) -> Generation:
    """Decode with only these earlier outputs known."""

    async def run() -> Generation:
        await llm.engine.reset()
        async for result in llm.engine.execute([Request("r", K.PREFILLING, payload, drafts=drafts)]):
            if isinstance(result, Failed):
                raise result.error
            if isinstance(result, Done):
                assert isinstance(result.value, Generation)
                return result.value
        raise AssertionError

    return llm.run(run())


FIXED: dict[str, Any] = {
    "labels": {"verdict": {"enum": ["no", "certainly not", "yes"]}},
    "keys": {"first_name": {"enum": ["a"]}, "number_of_legs": {"type": "integer"}, "is_it_true": {"const": 1}},
    "call": {"name": {"enum": ["look_up_the_city"]}, "arguments": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("name", FIXED)
def test_text_fixed_by_schema_is_accepted_and_wrong_form_is_harmless(session_llm: SessionLlm, name: str) -> None:
    keys = FIXED[name]
    schema = {"type": "object", "properties": keys, "required": list(keys), "additionalProperties": False}
    payload = Generate(Prompt(text="Answer:"), Sampling(max_tokens=48, json_schema=json.dumps(schema)))
    plain = decoded(session_llm, payload)
    right = decoded(session_llm, payload, *texts_of(payload))
    assert right == plain
    assert right.accepted > plain.accepted, "as far as a model with random weights cuts words as its tokenizer does"
    wrong = decoded(session_llm, payload, '{"quite": "' + GAP + '"}', "{" + GAP + '": 17}', "YES" + GAP)
    assert wrong == plain


@pytest.mark.parametrize("words", ["1. one\n2. two\n3. three\n4. four\n", "- a\n- b\n- c\n"])
def test_partly_correct_forms_change_no_output(session_llm: SessionLlm, words: str) -> None:
    payload = Generate(Prompt(text=f"A list.\n{words}"), Sampling(max_tokens=32, ignore_eos=True))
    plain, forms = decoded(session_llm, payload), forms_of_list("lines")
    assert decoded(session_llm, payload, *forms) == plain
    known = decoded(session_llm, payload, plain.text[:20] + GAP + plain.text[-10:] + GAP, *forms)
    assert known == plain and known.accepted > 0


@pytest.mark.long
async def test_requests_with_logits_processors_are_not_drafted() -> None:
    """vLLM takes none beside drafts, so that `auto` drafts nothing."""
    processors = ["vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor"]
    engine = VllmEngine("llm", str(llama.make()), engine_args={"logits_processors": processors, "max_model_len": 256})
    await engine.start()
    try:
        payload = Generate(Prompt(text="a a a a"), Sampling(max_tokens=8, ignore_eos=True))
        [*_, last] = [result async for result in engine.execute([Request("r", K.PREFILLING, payload, drafts=("a",))])]
        assert isinstance(last, Done) and last.value.completion_tokens == 8
        assert engine.profile.drafts == last.value.drafted == 0
    finally:
        await engine.stop()
