"""Tests of the five applications: the same result original and accelerated, and each runs by its one command."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.apps import agent, llamaindex, uploads, workflows
from examples.apps.engines import fake_pool
from examples.apps.runner import App, fresh, run
from teola_plugin import EnginePool, accelerate

ROOT = Path(__file__).parents[1]
NAMES = ("advanced_rag", "agent", "contextual_retrieval", "naive_rag", "search_engine")
QUESTIONS = ("What does an expression-less except clause match?", "What is the weather in Rome?", "Hello!")
HTML = "<html><head><title>x</title></head><body><h1>Farm</h1><p>Lambs eat\noats.</p></body></html>"


def app_of(name: str) -> App:
    found: App = importlib.import_module(f"examples.apps.{name}").APP
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with fake_pool(agent.TOOLS, factor=0.02) as made:
        yield made


@pytest.fixture
def no_loop() -> None:
    """Close the event loop that LlamaIndex's sync code would leave open."""
    asyncio.set_event_loop(None)


def test_every_app_file_is_tested() -> None:
    files = {path.stem for path in (ROOT / "examples" / "apps").glob("*.py")}
    others = {"__init__", "engines", "llamaindex", "prompts", "runner", "uploads", "workflows"}
    assert files - others == set(NAMES)


def inputs(app: App, question: str) -> dict[str, Any]:
    """Return inputs as the app's command line makes them."""
    arguments = type("Arguments", (), {"question": question, "document": None})
    return app.given(arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_accelerated_apps_equal_the_original(name: str, question: str, pool: EnginePool) -> None:
    app = app_of(name)
    plain = app.make(pool, proxy="proxy")
    fast, given, results = accelerate(plain), inputs(app, question), []
    for call in (plain.invoke, fast.invoke, lambda one: asyncio.run(fast.ainvoke(one))):
        fresh(pool)
        result = call(given)
        results.append((app.answer(result), app.sources(result)))
    assert results[0] == results[1] == results[2] and results[0][0]


@pytest.mark.parametrize("question", QUESTIONS[:2])
@pytest.mark.parametrize("name", llamaindex.FORMS)
@pytest.mark.usefixtures("no_loop")
def test_accelerated_llamaindex_forms_equal_the_original(name: str, question: str, pool: EnginePool) -> None:
    app = llamaindex.app_of(name)
    plain = app.make(pool, proxy="proxy")
    fast, given, results = app.faster(plain), inputs(app, question), []
    for call in (plain.invoke, fast.invoke, lambda one: asyncio.run(fast.ainvoke(one))):
        fresh(pool)
        result = call(given)
        results.append((app.answer(result), app.sources(result)))
    assert results[0] == results[1] == results[2] and results[0][0] and len(results[0][1]) == 3
    assert {"llm", "embedder", "store"} <= {span.engine for span in fast.last_trace().spans}
    assert not fast.engine.report().parts.at("original")


def test_partial_primitives_run_in_each_app(pool: EnginePool) -> None:
    """The search before the verdict, the embedding of the question before the upload is stored, prefixes."""
    for name in NAMES:
        fast = accelerate(app_of(name).make(pool, proxy="proxy"))
        fresh(pool)
        fast.invoke(inputs(app_of(name), QUESTIONS[0]))
        spans = {span.primitive: span for span in fast.last_trace().spans}
        assert any("partial" in primitive for primitive in spans), name
        if name == "search_engine":
            assert any(span.engine == "web" for span in spans.values())


@pytest.mark.parametrize("name", ["naive_rag", "advanced_rag", "contextual_retrieval"])
def test_uploads_of_two_apps_are_separate(name: str, pool: EnginePool) -> None:
    app = app_of(name)
    mine, other = (app.make(pool, collection=collection) for collection in ("mine", "other"))
    document = {"question": "What do lambs eat?", "document": "Lambs eat oats. " * 200}
    other.invoke({**document, "document": "Walls need lime. " * 200})
    found = {source for _ in range(2) for source in app.sources(accelerate(mine).invoke(document))}
    assert found and not any("lime" in source for source in found)


def test_mail_tool_runs_once_for_each_call(pool: EnginePool) -> None:
    """The tool is not read-only, so it never starts early and never runs twice."""
    app, sent = app_of("agent"), 0
    fast = accelerate(app.make(pool, proxy="llm"))
    for n in range(12):
        before = len(agent.SENT)
        result = fast.invoke(inputs(app, f"request {n}"))
        called = [message.name for message in agent.results(result["messages"])]
        assert len(agent.SENT) - before == called.count("send_mail")
        sent += called.count("send_mail")
    assert sent > 0


@pytest.mark.usefixtures("no_loop")
def test_llamaindex_form_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    llamaindex.main(["naive_rag", "--fakes", "0.02", "--compare"])
    printed = capsys.readouterr().out
    assert "same answer and sources: True" in printed and "[3] " in printed and "closed in" in printed
    with pytest.raises(SystemExit):
        llamaindex.main(["agent", "--fakes"])


@pytest.mark.parametrize("name", ["naive_rag", "search_engine"])
def test_app_command_prints_answer_sources_and_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(app_of(name), ["--fakes", "0.02", "--compare", "--question", "What does the with statement wrap?"])
    printed = capsys.readouterr().out
    assert "same answer and sources: True" in printed and "answer:   " in printed and "closed in" in printed
    assert "[1] " in printed or name == "search_engine"


@pytest.mark.parametrize("question", QUESTIONS[:2])
@pytest.mark.parametrize("name", NAMES)
def test_workflows_answer_alike_with_and_without_passes(name: str, question: str, pool: EnginePool) -> None:
    workflow = workflows.WORKFLOWS[name]("proxy")
    given, found = workflows.inputs(name, question, None), []
    own = f"{name}: {question}"
    for deployed in (workflow.deploy(pool, passes=(), name=f"{own} as written"), workflow.deploy(pool, name=own)):
        pool.reset()
        result = deployed.run(given)
        found.append((result.answer, [(source.id, source.text) for source in result.sources]))
    assert found[0] == found[1] and found[0][0]
    assert found[0][1] or name == "agent" or (name == "search_engine" and result.outputs["found"] is None)


def test_workflow_runs_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = workflows.run(["advanced_rag", "--fakes", "0.02"])
    printed = capsys.readouterr().out
    assert str(result.answer) in printed and "[3] " in printed and "done in" in printed and len(result.sources) == 3
    with pytest.raises(SystemExit):
        workflows.run(["none", "--fakes"])


def test_missing_upload_is_reported() -> None:
    with pytest.raises(SystemExit, match="there is no file"):
        run(app_of("naive_rag"), ["--fakes", "0", "--document", "none.pdf"])


def test_uploads_are_read_as_text(tmp_path: Path) -> None:
    text = tmp_path / "farm.txt"
    text.write_text("Lambs eat\noats.\n\n\nHay.")
    assert uploads.read(str(text)) == "Lambs eat oats.\n\nHay."
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SystemExit, match="not UTF-8"):
        uploads.read(str(text))
    assert "exception handlers" in uploads.read(None)


def test_html_and_pdf_are_read_by_llamaindex(tmp_path: Path) -> None:
    pytest.importorskip("llama_index.readers.file", reason="extra `readers`")
    page, paper = tmp_path / "farm.html", tmp_path / "farm.pdf"
    page.write_text(HTML)
    paper.write_bytes(pdf("Lambs eat oats."))
    assert uploads.read(str(page)).split() == ["Farm", "Lambs", "eat", "oats."]
    assert uploads.read(str(paper)) == "Lambs eat oats."


def pdf(text: str) -> bytes:
    """Return a PDF of one page with one line."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    made, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(made))
        made += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count, at = len(objects) + 1, len(made)
    made += b"xref\n0 %d\n0000000000 65535 f \n%s" % (count, table)
    return made + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (count, at)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts a vLLM of its own for each (make test-all)")
@pytest.mark.parametrize("name", NAMES)
def test_apps_on_real_engines_equal_the_original(name: str) -> None:
    command = [sys.executable, "-m", f"examples.apps.{name}", "--compare"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same answer and sources: True" in done.stdout and "answer:   " in done.stdout


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts a vLLM of its own for each (make test-all)")
@pytest.mark.parametrize("name", NAMES)
def test_workflows_run_on_real_engines(name: str) -> None:
    command = [sys.executable, "-m", "examples.apps.workflows", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "answer:   " in done.stdout and "done in" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts a vLLM of its own for each (make test-all)")
@pytest.mark.parametrize("name", llamaindex.FORMS)
def test_llamaindex_forms_on_real_engines_equal_the_original(name: str) -> None:
    command = [sys.executable, "-m", "examples.apps.llamaindex", name, "--compare"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same answer and sources: True" in done.stdout and "[3] " in done.stdout and "closed in" in done.stdout
