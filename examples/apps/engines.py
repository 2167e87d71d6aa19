"""The engines of the applications: real ones of this machine, or fakes with the latencies of other machines."""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.tools import BaseTool, StructuredTool

from teola_plugin import EnginePool
from teola_plugin.engines.fake import (
    FakeEmbedder,
    FakeLLM,
    FakeReranker,
    FakeStore,
    FakeTools,
    FakeWebSearch,
    own_score,
)
from teola_plugin.engines.profiles import rtx3090, scaled, tools, web_search
from teola_plugin.langchain import tool_engine
from teola_plugin.requests.payloads import Prompt, Sampling

PAGES = [
    {"url": "https://docs.test/try", "title": "try", "text": "An expression-less except clause matches any exception."},
    {"url": "https://docs.test/with", "title": "with", "text": "The with statement wraps the execution of a block."},
    {"url": "https://docs.test/raise", "title": "raise", "text": "raise without expressions re-raises the exception."},
    {"url": "https://docs.test/del", "title": "del", "text": "Deletion of a target list deletes from left to right."},
    {"url": "https://docs.test/pass", "title": "pass", "text": "pass is a null operation: nothing happens."},
]
"""What the search finds where there is no web."""
LINES = "one on each line"
"""Is how LlamaIndex asks for several questions."""
ASKED = re.compile(r"\b(?:Question|Query): *(\S.*)")
"""What a prompt asks other questions about: those of LangChain's form and of workflows, and LlamaIndex's."""
WORDS = ("oats", "ivy", "lambs", "hay", "spring", "walls", "june", "farm", "rain", "sheep", "barn", "grass", "seed")


def real_pool(
    args: argparse.Namespace,
    functions: Iterable[BaseTool] = (),
    *,
    policy: str = "topology-aware",
    prefix_caching: bool = True,
) -> EnginePool:
    """vLLM, MiniLM, a cross-encoder, PostgreSQL with pgvector, a search; others by flags. Without a GPU the
    models keep to cores of their own, as in `teola demo`."""
    from teola_plugin.cli.demo.engines import device_cores
    from teola_plugin.engines import (
        EmbeddingEngine,
        FullTextSearch,
        PgVectorEngine,
        RerankingEngine,
        VllmEngine,
        WebSearchEngine,
    )
    from teola_plugin.engines.model_cache import llm_folder, reranker_folder

    of_llm, of_others = device_cores()
    caching = {"enable_prefix_caching": prefix_caching}
    found: list[Any] = [
        VllmEngine("llm", args.llm or str(llm_folder()), engine_args=caching, cores=of_llm),
        EmbeddingEngine("embedder", args.embedder, cores=of_others),
        RerankingEngine("reranker", args.reranker or str(reranker_folder()), cores=of_others),
        PgVectorEngine("store", dsn=args.dsn),
    ]
    if args.proxy:
        found.append(VllmEngine("proxy", args.proxy, engine_args=caching, cores=of_llm))
    if args.app == "search_engine":
        own = FullTextSearch("web", args.pages or PAGES, dsn=args.dsn)
        found.append(own if args.web == "texts" else WebSearchEngine("web", service=args.web))
    if functions:
        found.append(tool_engine(functions))
    return EnginePool.local(found, policy=policy)


def functions_of(tools: Iterable[BaseTool]) -> dict[str, Callable[..., Any]]:
    """By the tool's name; of sync tools alone."""
    return {tool.name: tool.func for tool in tools if isinstance(tool, StructuredTool) and tool.func is not None}


def fake_pool(
    functions: Iterable[BaseTool] = (),
    *,
    factor: float = 1.0,
    policy: str = "topology-aware",
    prefix_caching: bool = True,
    llms: int = 1,
) -> EnginePool:
    """An RTX 3090 for each model, a search and tools of half a second; everything `factor` times as slow. The models
    answer in words that depend on the prompt, so that a wrong prompt makes another answer. `llms`: of each so many."""
    machine = scaled(rtx3090(), factor)
    model = replace(machine["llm"], prefix_caching=prefix_caching)
    by_name = functions_of(functions)
    engines: dict[str, Any] = {
        name: [FakeLLM(name, replace(model, device=f"{name}{n}"), answer) for n in range(llms)]
        for name in ("llm", "proxy")
    }
    engines |= {
        "embedder": FakeEmbedder("embedder", machine["embedder"]),
        "reranker": FakeReranker("reranker", machine["reranker"], own_score),
        "store": FakeStore("store", machine["store"]),
        "web": FakeWebSearch("web", web_search(0.5 * factor), [page["text"] for page in PAGES]),
        "tools": FakeTools("tools", by_name, tools(0.5 * factor)),
    }
    return EnginePool.local(engines, policy=policy)


def answer(prompt: Prompt, sampling: Sampling) -> str:
    """Of a fake model: what its schema asks for, else words by the prompt. More questions are in words of the question:
    so they find much of what that finds, as those of a model do."""
    text = prompt.flat()
    rng = random.Random(zlib.crc32(text.encode()))
    if sampling.json_schema:
        schema = json.loads(sampling.json_schema)
        return json.dumps(_of_schema(schema, rng, asked_words(text) if schema.get("type") == "array" else WORDS))
    lines = LINES in text
    words = rng.choices(asked_words(text) if lines else WORDS, k=min(sampling.max_tokens, 24))
    return "\n".join(map(" ".join, (words[:8], words[8:16], words[16:]))) if lines else " ".join(words)


def asked_words(prompt: str) -> Sequence[str]:
    """Those of the question in a prompt that asks for others like it."""
    found = ASKED.search(prompt)
    return re.findall(r"\w+", found.group(1)) if found else WORDS


def _of_schema(schema: dict[str, Any], rng: random.Random, words: Sequence[str]) -> Any:
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema["const"]])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _of_schema(rng.choice(choices), rng, words)
    if schema.get("type") == "array":
        return [_of_schema(schema["items"], rng, words) for _ in range(schema.get("minItems", 1))]
    if schema.get("type") == "object":
        return {key: _of_schema(one, rng, words) for key, one in schema.get("properties", {}).items()}
    return " ".join(rng.choices(words, k=6))
