"""vLLM's own API server on the bundled model, started as the demo starts it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from teola_plugin.adapters.demo_app import SERVED as MODEL
from teola_plugin.cli.demo.stock import ApiServer
from teola_plugin.cli.demo.stock import api_server as _started
from teola_plugin.engines.model_cache import llm_folder

__all__ = ["MODEL", "ApiServer", "api_server"]


@contextmanager
def api_server(folder: Path, flags: Sequence[str] = ()) -> Iterator[ApiServer]:
    """Start the server on the last CPU core. See `teola_plugin.cli.demo.stock.api_server`."""
    with _started(llm_folder(), folder, cores=str(sorted(os.sched_getaffinity(0))[-1]), flags=flags) as server:
        yield server
