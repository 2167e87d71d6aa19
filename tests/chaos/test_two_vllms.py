"""Tests of two client processes and two apps on two vLLM replicas: the answers are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from teola_plugin.cluster import deploy
from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.connection import actor
from teola_plugin.cluster.names import actor_name
from teola_plugin.engines.model_cache import llm_folder
from teola_plugin.pool import EnginePool

ROOT = Path(__file__).parents[2]
ARGS = {"dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "max_model_len": 2048}
ENGINES: dict[str, Any] = {
    "llm": {"kind": "vllm", "model": str(llm_folder()), "replicas": 2, "cores": ["0", "1"], "engine_args": ARGS},
    "embedder": {"kind": "embedding", "options": {"max_batch": 64}},
}
QUESTIONS = [f"What does the {word} statement do?" for word in ("with", "try", "raise", "del", "for", "while")]
CLIENT = """
import asyncio, json, sys
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.engines.sentence_transformers.embedding import packaged_minilm
address, app, questions, model = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
if address:
    pool = EnginePool.connect(address, pool="vllms")
else:
    pool = EnginePool.local(llm=model, embedder=packaged_minilm())
prompt = ChatPromptTemplate.from_messages([("system", "Answer the question of the user."), ("user", "{question}")])
with pool:
    embeddings = TeolaEmbeddings(pool=pool)
    answer = prompt | ChatTeola(pool=pool, max_tokens=24) | StrOutputParser()
    both = {"answer": answer, "vector": RunnableLambda(lambda given: embeddings.embed_query(given["question"]))}
    chain = accelerate(RunnableLambda(lambda given: given) | both, pool=pool, app=app)
    async def ask():
        return await asyncio.gather(*(chain.ainvoke({"question": q}) for q in questions))
    print("ready", flush=True)
    sys.stdin.readline()
    found = asyncio.run(ask())
    print(json.dumps([[one["answer"], list(one["vector"])] for one in found]))
"""

pytestmark = [
    pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts vLLM engines (make test-all)"),
    pytest.mark.vllm,
    pytest.mark.models,
]


def client(address: str, app: str) -> subprocess.Popen[str]:
    """Start a client process that waits for a question."""
    command = [sys.executable, "-c", CLIENT, address, app, json.dumps(QUESTIONS), str(llm_folder())]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    assert made.stdout is not None and made.stdout.readline().strip() == "ready"
    return made


def answers(*clients: subprocess.Popen[str]) -> list[list[Any]]:
    """Return the answers of clients that ask at the same time."""
    for process in clients:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=240)[0] for process in clients]
    assert not any(process.returncode for process in clients)
    return [json.loads(out.strip().splitlines()[-1]) for out in outputs]


def apps(engine: str) -> tuple[list[set[str]], set[str]]:
    """Return the apps of each batch, and the replicas."""
    batches = ray.get(actor(actor_name("vllms", engine)).recent_batches.remote())
    return [set(batch["apps"]) for batch in batches], {batch["replica"] for batch in batches}


def known_blocks() -> dict[str, int]:
    """Return the number of prefix blocks that placement knows, by replica."""
    host = actor(actor_name("vllms", "llm"))
    found: dict[str, int] = ray.get(
        host.__ray_call__.remote(lambda self: {i: self.port.scheduler.router.index.blocks_on(i) for i in "01"})
    )
    return found


def replicas_tell_that_they_are_emptied() -> None:
    """Check that each replica's cache is reported as empty. Only vLLM can report that."""
    assert sum(known_blocks().values()) > 0
    host = actor(actor_name("vllms", "llm"))
    ray.get(host.watch_closely.remote(0.3, 10.0))
    ray.get(host.reset.remote())
    until = time.monotonic() + 10
    while any(known_blocks().values()):
        assert time.monotonic() < until, known_blocks()
        time.sleep(0.2)


def test_two_apps_on_two_replicas_answer_as_a_local_pool(ray_address: str) -> None:
    [expected] = answers(client("", "alone"))
    deploy.up(PoolConfig.model_validate({"name": "vllms", "engines": ENGINES}), ray_address)
    try:
        with EnginePool.connect(ray_address, pool="vllms"):
            for found in answers(client(ray_address, "one"), client(ray_address, "two")):
                assert [answer for answer, _ in found] == [answer for answer, _ in expected]
                for (_, vector), (_, wanted) in zip(found, expected, strict=True):
                    assert vector == pytest.approx(wanted, abs=1e-5)  # batches differ in the last bits
            of_llm, replicas = apps("llm")
            assert replicas == {"0", "1"} and {"one", "two"} <= set().union(*of_llm)
            of_embedder, _ = apps("embedder")
            assert any({"one", "two"} <= held for held in of_embedder)  # in one batch
            replicas_tell_that_they_are_emptied()
    finally:
        deploy._kill(ray, "vllms")
