"""Decides which worker of pytest-xdist runs which test (`make test`)."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

ENGINES = (
    *("tests/chaos/", "tests/cluster/", "tests/engines/", "tests/real/"),
    *("tests/test_cli.py", "tests/test_compare.py", "tests/test_demo", "tests/test_examples.py"),
    *("tests/benchmarks/test_gpu_check.py", "tests/adapters/langchain/test_tools.py"),
)
"""Prefixes of the tests that start, count or kill processes."""


class EnginesTogether(LoadFileScheduling):  # type: ignore[misc]
    """Runs all tests that start engines on one worker, so that there is one engine of each kind.

    The tests of any other file run on one worker, one after the other.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if nodeid.startswith(ENGINES) else str(super()._split_scope(nodeid))
