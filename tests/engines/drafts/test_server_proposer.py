"""Tests of the proposer on a server that the user starts. They need no vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from teola_plugin.engines.vllm.drafts.options import DraftTexts, extra_args
from teola_plugin.engines.vllm.drafts.server import ServerProposer
from teola_plugin.graph import GAP
from teola_plugin.shims.vllm import drafts as shim

CONFIG = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=8), model_config=SimpleNamespace(max_model_len=200)
)
LOGGER = "vllm.teola_plugin"


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shim, "lacking", lambda: ())
    monkeypatch.setattr(shim, "mend", lambda: None)
    monkeypatch.setattr(shim, "encoder", lambda config: lambda text: [ord(char) for char in text])


class Server:
    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.proposer = ServerProposer(CONFIG)
        runner = SimpleNamespace(requests=self.requests, input_batch=SimpleNamespace(req_ids=[]))
        self.runner = runner
        self.proposer.attach(shim.Runner(runner))

    def first_step(self, name: str, written: str, **extra: Any) -> str:
        """Return the drafts for a request that has written this."""
        params = SimpleNamespace(temperature=0.0, extra_args=extra or None)
        self.requests.clear()
        self.requests[name] = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2])
        self.runner.input_batch.req_ids = [name]
        tokens = np.array([[1, 2, *map(ord, written)]])
        [draft] = self.proposer.propose([[ord(char) for char in written]], np.array([tokens.shape[1]]), tokens)
        return "".join(map(chr, draft))


@pytest.mark.usefixtures("fits")
def test_texts_and_forms_of_a_request_are_drafted() -> None:
    server = Server()
    assert server.first_step("a", "abc", teola_drafts=["abcdef"]) == "def"
    assert server.first_step("b", "N", teola_drafts=["YES" + GAP, "NO" + GAP]) == "O"
    assert server.first_step("c", "abc") == ""


@pytest.mark.usefixtures("fits")
def test_outputs_are_kept_only_for_named_apps_and_tenants() -> None:
    server = Server()
    for about in ({}, {"teola_tenant": "t"}, {"teola_app": "x"}):
        assert server.first_step("1", "abcdefgh", **about) == ""
        assert server.first_step("2", "abc", **about) == ("defgh" if about else "")
    assert server.first_step("3", "x", teola_forget_tenant="t") == ""
    assert server.first_step("4", "abc", teola_tenant="t") == ""
    assert server.first_step("5", "abc", teola_app="x") == "defgh"
    assert server.first_step("6", "x", teola_forget_all=1) == ""
    assert server.first_step("7", "abc", teola_app="x") == ""


def test_unsupported_vllm_logs_one_warning_and_drafts_no_tokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shim, "lacking", lambda: ("vllm.this:that",))
    with caplog.at_level(logging.WARNING, LOGGER):
        assert Server().first_step("a", "abc", teola_drafts=["abcdef"]) == ""
    assert caplog.messages == ["teola: this vLLM has no vllm.this:that: nothing is drafted"]


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("where", ["encoder", "mend", "max_draft_tokens"])
def test_fault_at_start_logs_one_warning_and_drafts_no_tokens(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("gone")

    monkeypatch.setattr(shim, where, broken)
    with caplog.at_level(logging.WARNING, LOGGER):
        server = Server()
        server.proposer.forget(None)
        assert server.first_step("a", "abc", teola_drafts=["abcdef"]) == ""
    assert caplog.messages == ["teola: AttributeError: gone: nothing is drafted"]


@pytest.mark.usefixtures("fits")
def test_fault_in_a_step_logs_one_warning_and_drafts_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    with caplog.at_level(logging.WARNING, LOGGER):
        assert server.proposer.propose([[1], [2]], None, None) == [[], []]
        assert server.first_step("a", "abc", teola_drafts=["abcdef"]) == ""
    assert len(caplog.messages) == 1


def test_malformed_extra_arguments_are_ignored() -> None:
    assert DraftTexts.of({"teola_drafts": ["a", 3, "b"], "x": 1}) == DraftTexts(("", ""), ["a", "b"], False)
    assert DraftTexts.of({"teola_drafts": "text"}) == DraftTexts.of({}) == DraftTexts(("", ""), [], False)
    assert DraftTexts.of({"teola_app": 1}).source == ("1", "")
    assert DraftTexts.of(extra_args(["a", "\ud800"], "x", "")) == DraftTexts(("x", ""), ["a"], True)


def test_texts_are_sent_to_vllm_as_plain_str() -> None:
    """vLLM refuses subclasses of `str` such as LangChain's `message.text` when it forwards a request."""

    class Text(str):
        __slots__ = ()

    [given] = extra_args([Text("a")], Text("x"), Text("y")).values()
    assert {type(text) for text in (*given["texts"], given["app"], given["tenant"])} == {str}
