"""The demo's app in LangChain's own classes, on a vLLM server, and engines of the same models."""

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
from teola_plugin.cli.demo.measure import Case, PreparedChain, run_case
from teola_plugin.cli.demo.server import DRAFTING, ApiServer, api_server
from teola_plugin.engines.sentence_transformers.loaded_models import no_loading_bars
from teola_plugin.errors import EngineUnavailable
from teola_plugin.pool import EnginePool


@dataclass(frozen=True, slots=True)
class StockSetup:
    """Running engines and the app; with `shipped` also the app on a server as vLLM ships, and that server."""

    pool: EnginePool
    app: App
    shipped: tuple[App, ApiServer] | None = None

    def shipped_chain(self, chain: Any) -> PreparedChain | None:
        """Return the same chain of the app on the server as vLLM ships; None without one."""
        if self.shipped is None:
            return None
        app, server = self.shipped
        name = next(name for name in ("chain", "indexed", "nothing_to_gain") if getattr(self.app, name) is chain)

        def prepare() -> None:
            if name == "chain":
                app.store.store.clear()
            server.reset()

        return PreparedChain(getattr(app, name), prepare)


@contextmanager
def start_stock_setup(models: Models, *, drafts: bool = False) -> Iterator[StockSetup]:
    """Start the server and engines of the same models, and make the app.

    Without a GPU the server is pinned to one core and everything else to another. With `drafts` the server drafts, and
    a second one is started as vLLM ships. Raise `EngineUnavailable` with the line that installs what is missing.
    """
    from teola_plugin.engines.bundled import files as bundled
    from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm

    _check_packages()
    llm_cores, other_cores = device_cores()
    local_models = models.embedder or packaged_minilm(), models.reranker or str(bundled.reranker_folder())
    folder = Path(tempfile.mkdtemp(prefix="teola-demo-"))
    llm = models.llm or bundled.llm_folder()
    with ExitStack() as stack:
        # The server as vLLM ships takes the usual port, under which the figures of its engine are stored.
        shipped = stack.enter_context(api_server(llm, folder, cores=llm_cores, wait=False))
        server = shipped
        if drafts:
            drafting_folder = Path(tempfile.mkdtemp(prefix="teola-demo-"))
            server = stack.enter_context(api_server(llm, drafting_folder, cores=llm_cores, wait=False, flags=DRAFTING))
        stack.enter_context(_pinned_to(other_cores))
        with no_loading_bars():  # while the servers start
            app = make_app(server.base_url, *local_models)
            shipped_app = (make_app(shipped.base_url, *local_models), shipped) if drafts else None
        shipped.wait()
        server.wait()
        with make_pool_for_app(server.base_url, *local_models, cores=other_cores, drafts=drafts) as pool:
            yield StockSetup(pool, app, shipped_app)


def _check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise EngineUnavailable(
            f"teola demo needs LangChain's own classes, and has no {', '.join(missing)}.",
            hint=f"pip install {' '.join(missing)}",
        )


@contextmanager
def _pinned_to(cores: str | None) -> Iterator[None]:
    """Pin this process, with its engines, to these cores: the server has other ones."""
    if cores is None:
        yield
        return
    import torch

    previous_cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    torch.set_num_threads(len(cores.split(",")))
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous_cores)
        torch.set_num_threads(threads)


def run_stock_cases(setup: StockSetup, question: str, uploaded: list[Any], repeats: int) -> Iterator[tuple[str, Case]]:
    """Yield three cases: the document comes with the question; it is indexed already; a chain with nothing to gain."""
    app, pool = setup.app, setup.pool

    def run(name: str, chain: Any, value: Any, *, is_empty_store: bool = False) -> Case:
        bind = [(obj, engine) for obj, engine in app.bind if chain is not app.nothing_to_gain or engine != "reranker"]
        prepare = app.store.store.clear if is_empty_store else lambda: None
        shipped = setup.shipped_chain(chain)
        return run_case(name, chain, value, pool, prepare, repeats=repeats, bind=bind, shipped=shipped)

    value = {"question": question, "documents": uploaded}
    yield "uploaded", run("uploaded document", app.chain, value, is_empty_store=True)
    yield "indexed", run("document already indexed", app.indexed, {"question": question})
    yield "nothing_to_gain", run("nothing to gain", app.nothing_to_gain, question)


def measure_indexing(app: App, uploaded: list[Any], repeats: int) -> float:
    """Return the median duration of indexing alone, in seconds."""
    times = []
    for _ in range(repeats):
        app.store.store.clear()
        start = time.perf_counter()
        app.index.invoke(uploaded)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
