"""Which worker runs which test, with pytest-xdist (`make test`)."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

ENGINES = (
    *("tests/chaos/", "tests/cluster/", "tests/engines/", "tests/real/"),
    *("tests/test_cli.py", "tests/test_compare.py", "tests/test_demo", "tests/test_examples.py"),
    *("tests/benchmarks/test_gpu_check.py", "tests/adapters/langchain/test_tools.py"),
)
"""Tests that start, count or kill processes."""


class EnginesTogether(LoadFileScheduling):  # type: ignore[misc]
    """One worker runs all tests that start engines, so that there is one engine of a kind; the tests of any other file
    run on one worker, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if nodeid.startswith(ENGINES) else str(super()._split_scope(nodeid))
