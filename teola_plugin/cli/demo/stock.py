"""Runs the demo's app in stock classes: on a vLLM server that is started for it, and on engines of the same models."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from teola_plugin.adapters.demo_app import PACKAGES, App, make_app
from teola_plugin.cli.demo.engines import Models, device_cores, make_pool_for_app
from teola_plugin.cli.demo.measure import Case, Shipped, run_case
from teola_plugin.cli.demo.server import DRAFTING, ApiServer, api_server
from teola_plugin.engines.sentence_transformers.progress_bars import no_loading_bars
from teola_plugin.errors import EngineUnavailable
from teola_plugin.pool import EnginePool


@dataclass(frozen=True, slots=True)
class Running:
    """Engines, the app, and the app on a server as vLLM ships, with that server, where there is one beside."""

    pool: EnginePool
    app: App
    shipped: tuple[App, ApiServer] | None = None

    def on_shipped(self, chain: Any) -> Shipped | None:
        """The same chain of the other app."""
        if self.shipped is None:
            return None
        app, server = self.shipped
        name = next(name for name in ("chain", "indexed", "nothing_to_gain") if getattr(self.app, name) is chain)

        def prepare() -> None:
            if name == "chain":
                app.store.store.clear()
            server.reset()

        return Shipped(getattr(app, name), prepare)


@contextmanager
def running(models: Models, *, drafts: bool = False) -> Iterator[Running]:
    """The server, the app and engines of the same models. Without a GPU the server has one core, all else another.

    With `drafts` that server drafts, and there is another one as vLLM ships. Raises `EngineUnavailable` with the line
    that installs what is missing.
    """
    from teola_plugin.engines.bundled import files as bundled
    from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

    _check_packages()
    llm_cores, others = device_cores()
    own = models.embedder or packaged_minilm(), models.reranker or str(bundled.reranker_folder())
    folder = Path(tempfile.mkdtemp(prefix="teola-demo-"))
    llm = models.llm or bundled.llm_folder()
    with ExitStack() as started:
        # As it ships on the usual port, so that figures of its engine are found again.
        shipped = started.enter_context(api_server(llm, folder, cores=llm_cores, wait=False))
        server = shipped
        if drafts:
            beside_it = Path(tempfile.mkdtemp(prefix="teola-demo-"))
            server = started.enter_context(api_server(llm, beside_it, cores=llm_cores, wait=False, flags=DRAFTING))
        started.enter_context(_pinned(others))
        with no_loading_bars():  # while the servers start
            app = make_app(server.base_url, *own)
            beside = (make_app(shipped.base_url, *own), shipped) if drafts else None
        shipped.wait()
        server.wait()
        with make_pool_for_app(server.base_url, *own, cores=others, drafts=drafts) as pool:
            yield Running(pool, app, beside)


def _check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise EngineUnavailable(
            f"teola demo needs LangChain's own classes, and has no {', '.join(missing)}.",
            hint=f"pip install {' '.join(missing)}",
        )


@contextmanager
def _pinned(cores: str | None) -> Iterator[None]:
    """Pin this process, with its engines, to these cores: the server has the others."""
    if cores is None:
        yield
        return
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    torch.set_num_threads(len(cores.split(",")))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def run_cases(on: Running, question: str, uploaded: list[Any], repeats: int) -> Iterator[tuple[str, Case]]:
    """The document comes with the question; the document is there already; a chain with nothing to gain."""
    app, pool = on.app, on.pool

    def case(name: str, chain: Any, given: Any, *, fresh: bool = False) -> Case:
        bind = [(obj, engine) for obj, engine in app.bind if chain is not app.nothing_to_gain or engine != "reranker"]
        clear = app.store.store.clear if fresh else lambda: None
        return run_case(name, chain, given, pool, clear, repeats=repeats, bind=bind, shipped=on.on_shipped(chain))

    given = {"question": question, "documents": uploaded}
    yield "uploaded", case("uploaded document", app.chain, given, fresh=True)
    yield "indexed", case("document already indexed", app.indexed, {"question": question})
    yield "nothing_to_gain", case("nothing to gain", app.nothing_to_gain, question)


def index_seconds(app: App, uploaded: list[Any], repeats: int) -> float:
    """Return the median duration of indexing alone, in seconds."""
    return statistics.median(_timed(app, uploaded) for _ in range(repeats))


def _timed(app: App, uploaded: list[Any]) -> float:
    app.store.store.clear()
    begun = time.perf_counter()
    app.index.invoke(uploaded)
    return time.perf_counter() - begun
