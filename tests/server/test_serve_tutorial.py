"""Tests of the tutorial docs/serve-many-apps.md from an empty folder, and of the YAML settings in the documents."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.documents import DOCUMENTS, ROOT, code
from support.serve_tutorial import SERVE_TUTORIAL, check_serve_tutorial

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.server.settings import ServiceConfig


def test_serve_tutorial_runs_from_an_empty_folder(tmp_path: Path) -> None:
    check_serve_tutorial(sys.executable, tmp_path, {"PYTHONPATH": str(ROOT)})


def test_parts_of_the_tutorial_app_run_concurrently() -> None:
    names: dict[str, Any] = {}
    [apps] = code(SERVE_TUTORIAL)
    exec(apps, names)

    with EnginePool.local(fake_engines(rtx3090())) as pool:
        fast = accelerate(names["review"](pool), pool=pool)
        fast.invoke({"text": "The supplier may change prices at any time."})
        trace = fast.last_trace()

    decodings = sorted((span for span in trace.spans if span.kind == "DECODING"), key=lambda span: span.begin)
    assert len(decodings) == 3
    assert decodings[1].begin < decodings[0].done
    assert decodings[2].begin >= decodings[1].done


def yaml_blocks(document: Path) -> list[str]:
    return re.findall(r"(?ms)^```yaml\n(.*?)^```$", document.read_text())


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if yaml_blocks(path)], ids=lambda path: path.name)
def test_settings_shown_in_documents_are_accepted(document: Path) -> None:
    for text in yaml_blocks(document):
        for number in range(text.count("sha256:...")):
            text = text.replace("sha256:...", f"sha256:{number:064x}", 1)
        if not re.search(r"(?m)^(engines|apps|langgraph):", text):
            text = f"engines: {{llm: {{kind: fake}}}}\n{text}"
        ServiceConfig.parse(text, document.name)
