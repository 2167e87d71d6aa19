"""A `VllmEngine` that drafts: what it measures, what it forgets, what rules drafts out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from teola_plugin import EnginePool
from teola_plugin.engines.vllm import VllmEngine, host
from teola_plugin.engines.vllm.drafts.options import ENV
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Generate, Generation, Prompt, Sampling
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

pytestmark = pytest.mark.vllm
K = PrimitiveKind


def written(llm: SessionLlm, text: str, **about: Any) -> Generation:
    async def run() -> Generation:
        asked = Generate(Prompt(text=text), Sampling(max_tokens=48, ignore_eos=True))
        async for result in llm.engine.execute([Request("r", K.PREFILLING, asked, **about)]):
            if isinstance(result, Failed):
                raise result.error
            if isinstance(result, Done):
                assert isinstance(result.value, Generation)
                return result.value
        raise AssertionError(text)

    return llm.run(run())


def test_what_was_drafted_is_told(session_llm: SessionLlm) -> None:
    plain = written(session_llm, "a text with nothing before it")
    again = written(session_llm, "a text with nothing before it", drafts=(plain.text,))
    assert again == plain
    assert again.drafted >= again.accepted > 0
    assert session_llm.engine.profile.drafts == 16


def test_a_tenants_outputs_serve_its_app_until_they_are_forgotten(session_llm: SessionLlm) -> None:
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


def test_measuring_tells_what_verifying_takes(session_llm: SessionLlm) -> None:
    profile = session_llm.run(session_llm.engine.measure())
    assert set(profile.verifying) <= {1, 4, 16} and 1 in profile.verifying
    assert all(seconds > 0 for curve in profile.verifying.values() for _, seconds in curve.points)
    again = written(session_llm, "and then it drafts as ever", drafts=("something else",))
    assert again.completion_tokens == 48


@pytest.mark.parametrize(
    "given", [{"speculative_config": None}, {"worker_extension_cls": "a.B"}, {"async_scheduling": True}], ids=str
)
def test_arguments_of_the_users_own_rule_drafts_out(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        engine = VllmEngine("llm", "model", engine_args=given, drafts="auto")
    assert engine._setup.drafts is None
    [line] = caplog.messages
    assert line.startswith("llm: ") and next(iter(given)) in line and "nothing is drafted" in line
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        caplog.clear()
        VllmEngine("llm", "model", engine_args=given, drafts="off")
    assert not caplog.messages


def test_pools_pass_it_on() -> None:
    engine: Any = EnginePool.local(llm="some/model", drafts={"tokens": 3}).engine("llm")
    assert engine._setup.drafts.tokens == 3 and engine._setup.drafts_on_cuda
    with pytest.raises(TeolaError, match="tokens is 0"):
        EnginePool.local(llm="some/model", drafts={"tokens": 0})
    with pytest.raises(RegistrationError, match="say them of the engine") as raised:
        EnginePool.local(llm=VllmEngine("llm", "model"), drafts="auto")
    assert raised.value.hint


@pytest.mark.parametrize(
    ("said", "cpu", "drafted"), [("auto", True, True), ("auto", False, False), ({}, False, True), ("off", True, False)]
)
def test_auto_drafts_on_the_cpu_alone(said: Any, cpu: bool, drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.drafts_shim, "lacking", lambda: ())
    monkeypatch.setattr(host.drafts_shim, "arguments", lambda tokens, *names: {"speculative_config": tokens})
    monkeypatch.setenv(ENV, "")
    platform = host.shim.Platform(cpu, "cpu" if cpu else "cuda")
    setup = VllmEngine("llm", "model", drafts=said)._setup
    assert ("speculative_config" in host._arguments(setup, platform, {})) == drafted
