"""The LLM engine on a GPU: answers of split prompts, faults, and what a warmed-up prefix saves.

Models have random weights, so no model hub is needed: a tiny Llama in float32 and bfloat16, and one of 1.5 billion
parameters for realistic times. Takes a few minutes. Ends with status 1 when a check fails.

    python -m benchmarks.gpu_check --json

With `--cpu` it runs on vLLM's CPU build instead, with fewer prompts and a smaller large model: a trial of the checks,
whose times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import arguments, environment, report, summary
from benchmarks.llm.checks import FAULTS, Report, ask, chat, parity, request, tenant
from teola_plugin.engines.bundled import llama as tiny_llama
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.requests.payloads import UNKNOWN, Generate, Prompt, Sampling, Warmup

LARGE = {
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}
"""Over the tiny Llama's configuration; vLLM makes the weights up (`load_format="dummy"`), so only times count."""
LARGE_ON_CPU = LARGE | {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 4}
LARGE_ON_CPU |= {"num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to do."""

    prompts: int
    repeats: int
    prefixes: tuple[int, ...]
    large: dict[str, Any]
    kv_bytes: int


ON_GPU = Scale(200, 9, (1000, 4000, 8000), LARGE, 8 << 30)
ON_CPU = Scale(24, 3, (500, 1000), LARGE_ON_CPU, 1 << 28)


@dataclass(frozen=True, slots=True)
class Section:
    """One start of the engine and what is done with it. `env` is set for vLLM's process."""

    args: dict[str, Any]
    exact: bool = False
    """Whether all answers must be equal; with rounder numbers even plain batching changes some."""
    faults: bool = False
    answers: bool = True
    env: dict[str, str] = field(default_factory=dict)
    only_gpu: bool = False


def sections(scale: Scale) -> dict[str, Section]:
    tiny = {"max_model_len": 4096, "kv_cache_memory_bytes": scale.kv_bytes}
    half = tiny | {"dtype": "bfloat16"}
    large = {"load_format": "dummy", "hf_overrides": scale.large, "dtype": "bfloat16", "max_model_len": 16384}
    return {
        "tiny_float32": Section(tiny | {"dtype": "float32"}, exact=True, faults=True),
        "tiny_bfloat16": Section(half),
        # vLLM's own mode in which batching changes no answer; splitting should not either.
        "tiny_bfloat16_invariant": Section(half, exact=True, env={"VLLM_BATCH_INVARIANT": "1"}, only_gpu=True),
        "large_bfloat16": Section(large | {"kv_cache_memory_bytes": scale.kv_bytes}, answers=False),
    }


@asynccontextmanager
async def started(name: str, section: Section, cpu: bool) -> AsyncIterator[tuple[VllmEngine, Report]]:
    before = dict(os.environ)
    os.environ.update(section.env)
    engine = VllmEngine(f"gpu-check-{name}", tiny_llama.make(), engine_args=section.args, cores="0" if cpu else None)
    try:
        began = time.perf_counter()
        await engine.start()
        profile = engine.profile
        yield (
            engine,
            {
                "start_s": round(time.perf_counter() - began, 2),
                "engine_args": section.args,
                "environment": section.env,
                "device": profile.device,
                "versions": {k: v for k, v in engine.versions().items() if k != "model"},
                "max_batched_tokens": profile.max_batch,
                "max_requests": profile.max_requests,
            },
        )
    finally:
        os.environ.clear()
        os.environ.update(before)
        await engine.stop()


async def run_section(name: str, section: Section, scale: Scale, cpu: bool) -> Report:
    found: Report = {}
    try:
        async with started(name, section, cpu) as (engine, found):
            if section.answers:
                found["parity"] = await tried(parity(engine, scale.prompts, exact=section.exact))
                found["times"] = await tried(times(engine, scale.repeats))
            else:
                found["split"] = await tried(splits(engine, scale.prefixes, scale.repeats))
                found["profile"] = await tried(measured(engine))
            for fault, check in FAULTS.items() if section.faults else ():
                found[fault] = await tried(check(engine))
    except Exception as failed:  # the other sections still tell something
        found["start"] = {"passed": False, "error": f"{type(failed).__name__}: {failed}"}
    return found


async def tried(work: Awaitable[Report]) -> Report:
    try:
        return await work
    except Exception as failed:
        return {"passed": False, "error": f"{type(failed).__name__}: {failed}"}


# Times, in seconds. Texts repeat one word that is one token; every request has a tenant of its own, so nothing is
# cached for it but what it warmed up.


def words(count: int) -> Prompt:
    return Prompt(text=" the" * count)


async def first_token(engine: VllmEngine, tokens: int, whose: str = "") -> float:
    return (await ask(engine, request(Generate(words(tokens), Sampling(max_tokens=1)), whose or tenant()))).first


async def warm_up(engine: VllmEngine, tokens: int, whose: str) -> float:
    return (await ask(engine, request(Warmup(Prompt(text=words(tokens).text + UNKNOWN)), whose))).seconds


async def split(engine: VllmEngine, prefix: int, rest: int, repeats: int) -> Report:
    """Time to the first token of a prompt: in one go, and when its prefix was warmed up before."""
    taken: list[tuple[float, float, float]] = []
    for _ in range(repeats + 2):
        whole = await first_token(engine, prefix + rest)
        whose = tenant()
        taken.append((whole, await warm_up(engine, prefix, whose), await first_token(engine, prefix + rest, whose)))
    wholes, warmed, second = map(list, zip(*taken[2:], strict=True))  # the first two pay for what is built lazily
    return {
        "prefix_tokens": prefix,
        "rest_tokens": rest,
        "whole_s": summary(wholes, digits=5),
        "warm_up_s": summary(warmed, digits=5),
        "second_phase_s": summary(second, digits=5),
        "second_phase_over_whole": round(median(second) / median(wholes), 3),
        "both_phases_over_whole": round((median(warmed) + median(second)) / median(wholes), 3),
    }


async def splits(engine: VllmEngine, prefixes: tuple[int, ...], repeats: int) -> Report:
    return {str(prefix): await split(engine, prefix, 100, repeats) for prefix in prefixes}


async def times(engine: VllmEngine, repeats: int) -> Report:
    prefill = {n: min([await first_token(engine, n) for _ in range(repeats)]) for n in (256, 1024, 3000)}
    decoding = [await decode_step(engine) for _ in range(repeats)]
    return {
        "prefill_s": {str(n): round(took, 5) for n, took in prefill.items()},
        "prefill_us_a_token": round(1e6 * (prefill[3000] - prefill[256]) / (3000 - 256), 3),
        "decode_ms_a_token": round(1e3 * median(decoding), 4),
        "split": await split(engine, 1600, 100, repeats),
        "worst_token_gap_ms": await gaps(engine, repeats),
    }


async def decode_step(engine: VllmEngine, tokens: int = 129) -> float:
    """From whole requests: pieces may arrive several at a time, so their times say little about single tokens."""

    async def whole(count: int) -> float:
        payload = Generate(chat("Go on."), Sampling(max_tokens=count, ignore_eos=True))
        return (await ask(engine, request(payload, tenant()))).seconds

    return (await whole(tokens) - await whole(1)) / (tokens - 1)


async def gaps(engine: VllmEngine, repeats: int) -> Report:
    """The longest pause in a token stream: alone, beside a warm-up of 3000 tokens, beside a prompt of as many."""

    async def beside(other: Callable[[], Awaitable[float]] | None) -> float:
        work: list[asyncio.Task[float]] = []

        def disturb(piece: int) -> None:
            if piece == 20 and other is not None:
                work.append(asyncio.ensure_future(other()))  # type: ignore[arg-type]

        payload = Generate(chat("Go on."), Sampling(max_tokens=400, ignore_eos=True))
        seen = await ask(engine, request(payload, tenant(), stream=True), disturb)
        await asyncio.gather(*work)
        return 1e3 * seen.gap

    others: dict[str, Callable[[], Awaitable[float]] | None] = {
        "alone": None,
        "beside_warm_up": lambda: warm_up(engine, 3000, tenant()),
        "beside_prompt": lambda: first_token(engine, 3000),
    }
    return {name: summary([await beside(other) for _ in range(repeats)], digits=3) for name, other in others.items()}


async def measured(engine: VllmEngine) -> Report:
    """What the engine finds out about itself, as it does before its first query."""
    began = time.perf_counter()
    profile = await engine.measure()
    curves = {kind.name.lower(): curve.points for kind, curve in profile.curves.items()}
    return {"seconds": round(time.perf_counter() - began, 2), "curves": curves, "warmup_chunk": profile.warmup_chunk}


def hardware(cpu: bool) -> Report:
    """Name and memory of the GPU. Raises `SystemExit` without one."""
    if cpu:
        return {"name": "CPU"}
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("There is no CUDA GPU here. --cpu tries the checks on vLLM's CPU build.")
    found = torch.cuda.get_device_properties(0)
    return {"name": found.name, "memory_gib": round(found.total_memory / (1 << 30), 1), "cuda": torch.version.cuda}


def failures(found: Report) -> list[str]:
    """Names of the checks that did not pass, as `section.check`."""
    return [
        f"{section}.{name}"
        for section, checks in found.items()
        for name, check in checks.items()
        if isinstance(check, dict) and check.get("passed") is False
    ]


async def main(options: argparse.Namespace) -> Report:
    scale = ON_CPU if options.cpu else ON_GPU
    found: Report = {}
    result: Report = {
        "benchmark": "gpu_check",
        "command": "python -m benchmarks.gpu_check --json" + (" --cpu" if options.cpu else ""),
        "hardware": hardware(options.cpu),
        "sections": found,
    }
    for name, section in sections(scale).items():
        if options.only not in name or (section.only_gpu and options.cpu):
            continue
        found[name] = await run_section(name, section, scale, options.cpu)
        result |= {"failed": failures(found), "environment": environment()}
        if options.out is not None:  # after every section: a run that is cut short still tells something
            options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def rows(result: Report) -> list[Report]:
    shown = []
    for name, section in result["sections"].items():
        checks = {k: v for k, v in section.items() if isinstance(v, dict) and "passed" in v}
        one = section.get("times", {}).get("split", {})
        several = section.get("split", {}).values()
        ratios = [s["second_phase_over_whole"] for s in (one, *several) if isinstance(s, dict) and s]
        passed = sum(bool(v["passed"]) for v in checks.values())
        shown.append(
            {
                "section": name,
                "start s": section.get("start_s", "-"),
                "passed": f"{passed}/{len(checks)}",
                "second phase / whole": ", ".join(map(str, ratios)),
            }
        )
    return shown


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="on vLLM's CPU build, smaller")
    parser.add_argument("--only", default="", help="only sections whose name contains this")
    parser.add_argument("--out", type=Path, help="also write the JSON here, after every section")


if __name__ == "__main__":
    chosen = arguments(__doc__ or "", add)
    outcome = asyncio.run(main(chosen))
    report(outcome, chosen, "The LLM engine on " + outcome["hardware"]["name"], rows(outcome))
    sys.exit(bool(outcome.get("failed")))
