"""Tests of answers without a reader from servers over HTTP: vLLM sends the first token, and then the rest."""

from __future__ import annotations

from typing import Any

import pytest
from support.openai_stub import MODEL, openai_stub

from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool
from teola_plugin.workflow import Generation, Map, Workflow

APP = Workflow(
    "listed", Generation("list", "{x}", items="lines") >> Map("all", over="list", flow=Generation("one", "say {item}"))
)


def bodies(kind: str, *, streamed: bool = False) -> dict[str, Any]:
    """Return the bodies of the server's requests, by the first letters of the prompt."""
    with openai_stub() as stub:
        stub.kind = kind
        with EnginePool.local(
            [OpenAIServer("llm", base_url=stub.base_url, model=MODEL, dedicated=True, prefix_caching=False)]
        ) as pool:
            app = (Workflow("plain", Generation("one", "say {x}")) if streamed else APP).deploy(pool)
            if streamed:
                assert "".join(app.stream({"x": "words"}))
            else:
                app.run({"x": "one line"})
        return {body["messages"][0]["content"][:3]: body for _, body in stub.requests}


@pytest.mark.parametrize(("kind", "seldom"), [("vllm", True), ("stub", False)])
def test_only_vllm_gets_a_stream_interval_for_unread_answers(kind: str, seldom: bool) -> None:
    bodies_by_prompt = bodies(kind)
    assert all(body["stream"] for body in bodies_by_prompt.values()), "first tokens are told"
    assert ("stream_interval" in bodies_by_prompt["say"]) is seldom
    assert "stream_interval" not in bodies_by_prompt["one"], "items are read as they are written"


def test_streamed_answer_has_no_stream_interval() -> None:
    assert "stream_interval" not in bodies("vllm", streamed=True)["say"]
