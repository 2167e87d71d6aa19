"""Golden files of the passes: the text of a graph before and after. `pytest --update-golden` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pass_apps import Golden

from teola_plugin.graph import Graph

GOLDEN = Path(__file__).parents[2] / "golden" / "passes"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Return a function: `golden("pass/case", before, after)` compares with `tests/golden/passes/pass/case.txt`."""
    update = request.config.getoption("--update-golden", default=False)

    def check(name: str, before: Graph, after: Graph) -> None:
        path = GOLDEN / f"{name}.txt"
        text = f"--- before\n{before}\n--- after\n{after}\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {path}: run pytest --update-golden and review it"
        assert text == path.read_text()

    return check
