"""Tests that kill processes of local engines while queries run: each call has its answer or one clear error."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from teola_plugin import accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
from teola_plugin.engines.pgvector import PgVectorEngine
from teola_plugin.errors import EngineUnavailable
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore
from teola_plugin.pool import EnginePool

pytestmark = [pytest.mark.chaos, pytest.mark.postgres]


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a folder that PostgreSQL's user can enter, which pytest's own folders do not allow."""
    folder = Path(tempfile.mkdtemp(prefix="teola-test-"))
    folder.chmod(0o755)
    yield folder / "data"
    shutil.rmtree(folder)


@pytest.fixture
def pool(home: Path) -> Iterator[EnginePool]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads_before = threading.enumerate()  # the pool of all objects without one lives as long as the process
    with EnginePool.local([FakeLLM(), FakeEmbedder(), PgVectorEngine("store", data_dir=home)]) as made:
        yield made
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE], left
    new_threads = [thread for thread in threading.enumerate() if thread not in threads_before]
    assert not [thread for thread in new_threads if thread.name == "teola-pool"]


def postmaster(home: Path) -> int:
    return int((home / "pgdata" / "postmaster.pid").read_text().split()[0])


def test_queries_recover_after_the_database_is_killed(pool: EnginePool, home: Path) -> None:
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["lambs eat straw", "boats have sails", "barns are red"])
    found = RunnablePassthrough.assign(found=lambda given: store.similarity_search(given["question"], k=1))
    plain = found | ChatPromptTemplate.from_template("{question} by {found}") | ChatTeola(pool=pool)
    fast, question = accelerate(plain), {"question": "what do lambs eat?"}
    expected, over, answers, errors = plain.invoke(question).content, threading.Event(), [], []

    def ask() -> None:
        while not over.is_set():
            try:
                answers.append((time.monotonic(), fast.invoke(question).content))
            except EngineUnavailable as error:
                errors.append(error)
                time.sleep(0.05)

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask) for _ in range(4)]
        try:
            time.sleep(0.5)
            os.kill(postmaster(home), signal.SIGKILL)
            killed = time.monotonic()
            deadline = killed + 60
            while not [at for at, _ in answers if at > killed + 0.5] and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            over.set()
        for one in asking:
            one.result(60)  # nothing hangs, and nothing else is raised
    assert [at for at, _ in answers if at > killed + 0.5], "it did not come back"
    assert {answer for _, answer in answers} == {expected}
    assert all(error.hint and "store" in str(error) for error in errors)
