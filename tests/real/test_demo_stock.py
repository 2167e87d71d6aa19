"""Tests of the app of `teola demo` in LangChain's own classes, and of the reasons why it gets faster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.api_server import ApiServer

from teola_plugin import accelerate
from teola_plugin.adapters.demo_app import App, make_app
from teola_plugin.cli.demo import documents, stock
from teola_plugin.cli.demo.engines import make_pool_for_app
from teola_plugin.cli.demo.measure import tokens_cached_by_warmups
from teola_plugin.cli.main import main
from teola_plugin.engines.model_cache import reranker_folder
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm
from teola_plugin.pool import EnginePool

FIRED = {"prune-dependencies", "prefilling-split", "decoding-pipelining"}
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture
def app(vllm_api: ApiServer) -> App:
    return make_app(vllm_api.base_url, packaged_minilm(), str(reranker_folder()))


@pytest.fixture
def pool(vllm_api: ApiServer) -> Iterator[EnginePool]:
    with make_pool_for_app(vllm_api.base_url, packaged_minilm(), str(reranker_folder()), cores="0") as made:
        yield made


@pytest.mark.vllm
@pytest.mark.models
def test_accelerated_demo_equals_the_original_by_every_entry_point(app: App, pool: EnginePool) -> None:
    fast = accelerate(app.chain, pool=pool, bind=app.bind)
    given = {"question": documents.DEFAULT_QUESTION, "documents": documents.load_documents([])}
    assert set(fast.plan(given).fired) == FIRED
    own = {"ids.split_documents", "ids.add_documents"}
    assert {name for row in fast.report().parts if row.level != "lowered" for name in row.components} == own
    with asyncio.Runner() as loop:
        plain = app.chain.invoke(given)
        for ask in (fast.invoke, lambda x: loop.run(fast.ainvoke(x)), lambda x: "".join(fast.stream(x))):
            app.store.store.clear()
            pool.reset()
            assert ask(given) == plain
            trace = fast.last_trace()
            assert trace is not None and tokens_cached_by_warmups(trace) > 0
            lost = [s.primitive for s in trace.spans if s.unused and s.started is not None and s.engine]
            assert not lost


def test_missing_demo_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stock, "find_spec", lambda name: None if name == "langchain_openai" else object())
    assert main(["demo"]) == 1
    assert "pip install langchain-openai\n" in capsys.readouterr().err.replace(".\n", "\n")


@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts engines of its own (make test-all)")
@pytest.mark.vllm
@pytest.mark.models
def test_demo_command_reports_equal_answers_as_json() -> None:
    command = [sys.executable, "-m", "teola_plugin.cli.main", "demo", "--stock", "--json", "--repeats", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["answers_equal"] is True and "it matches any exception" in report["answer"]
    assert report["cached_prefix_tokens"] > 0 and report["bound_s"] > 0
    for found in (report, report["one_line"], *report["cases"].values()):
        assert min(found[key] for key in ("plain_s", "plain_same_engine_s", "accelerated_s")) > 0
    assert set(report["passes_fired"]) == FIRED and set(report["cases"]) == {"uploaded", "indexed", "nothing_to_gain"}
    assert Path(report["trace_html"]).is_file()


@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts engines of its own (make test-all)")
@pytest.mark.vllm
@pytest.mark.postgres
@pytest.mark.models
def test_demo_command_prints_an_early_answer_and_short_report() -> None:
    command = [sys.executable, "-u", "-m", "teola_plugin.cli.main", "demo", "--repeats", "2"]
    begun, lines, answered = time.monotonic(), [], 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("Answer"):
                answered = time.monotonic() - begun
    text = "".join(lines)
    assert process.returncode == 0 and len(lines) <= 30
    assert 0 < answered < 60
    assert text.count("same answer") == 3 and text.count("\u2588 ") == 6 and "saved" in text
    pages = re.findall(r"\S+\.html", text)
    assert len(pages) == 2 and all(Path(page).is_file() for page in pages)
