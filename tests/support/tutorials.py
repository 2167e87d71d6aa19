"""Runs the tutorials of the documentation against a fake server, with an interpreter that the caller chooses."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.documents import saved_files
from support.openai_stub import MODEL, OpenAIStub, openai_stub
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm


def tutorial_reply(body: dict[str, Any]) -> dict[str, Any]:
    """Answer a chat request of a tutorial: with a call of each tool first, then with text."""
    messages = body["messages"]
    tools = [tool["function"]["name"] for tool in body.get("tools", ())]
    if not tools or messages[-1]["role"] == "tool":
        return {"content": f"yes, says message {len(messages)}"}
    arguments = json.dumps({"place": "Oslo"})
    calls = [
        {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}} for name in tools
    ]
    return {"content": None, "tool_calls": calls}


def is_each_request_sent_equally_often(server: OpenAIStub) -> bool:
    """Return True if the runs of a tutorial, plain and accelerated, sent the same requests."""
    bodies = Counter(json.dumps(body, sort_keys=True) for body in server.generations)
    return len(set(bodies.values())) == 1


def check_tutorial(document: Path, python: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Save a tutorial's files in an empty folder and run the last one with the interpreter `python`.

    Fail if it fails, if nothing starts early, or if the accelerated run gives another answer or sends other requests.
    """
    with openai_stub(tutorial_reply) as server:
        replacements = {
            r"http://localhost:80[08]0/v1": server.base_url,
            r"Qwen/[\w.-]+": MODEL,
            r"BAAI/[\w.-]+": packaged_minilm(),
            r"time\.sleep\(1\)": "time.sleep(0.01)",
        }
        for name, text in saved_files(document).items():
            for written, used in replacements.items():
                text = re.sub(written, used, text)
            (folder / name).write_text(text)
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        full_environment = {**inherited, "OPENAI_BASE_URL": server.base_url, **environment}
        ran = subprocess.run(
            [python, name], cwd=folder, env=full_environment, capture_output=True, text=True, timeout=240
        )

    assert ran.returncode == 0, ran.stderr
    assert "Starts early:" in ran.stdout
    assert "Starts early:  nothing" not in ran.stdout
    plain, accelerated = re.findall(r"(?m)^(?:plain|accelerated) +\d+\.\d s  (.+)$", ran.stdout)
    assert plain == accelerated
    assert is_each_request_sent_equally_often(server) or "dedicated" in text
