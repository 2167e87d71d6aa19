"""Calls every function of `teola_plugin.shims.vllm` on the installed vLLM, without an engine.

Writes the results as JSON.

Run it in a process of its own (`python -m support.vllm_names FILE`), because vLLM changes the process that imports it.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from teola_plugin.engines.bundled import llama
from teola_plugin.engines.vllm import scheduler as ours
from teola_plugin.engines.vllm.drafts.worker import PROPOSER, WORKER
from teola_plugin.errors import TeolaError
from teola_plugin.shims.vllm import drafts, kv_events, llm, processes, scheduler, stats, streams, versions


def main() -> None:
    report = {
        "lacking": [*versions.missing(*llm.NEEDED), *_lacking()],
        "platform": llm.platform().device,
        "needed": _error_of(lambda: llm.check_needed("llm")),
        **_config(),
        **_prompts(),
        **_events(),
        **_stats(),
        **_streams(),
        **_scheduler(),
        **_drafts(),
        **_when_missing(),
    }
    Path(sys.argv[1]).write_text(json.dumps(report))


def _lacking() -> list[str]:
    return [name for part in (kv_events, stats, processes, scheduler, drafts, streams) for name in part.lacking()]


def _config() -> dict[str, Any]:
    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    args = {"model": str(llama.make()), "dtype": "float32", "max_model_len": 512, "block_size": 32}
    args |= {"structured_outputs_config": structured, "kv_events_config": kv_events.publishing("ipc:///x")}
    config = llm.engine_config(args)
    limits = llm.limits(config)
    return {
        "limits": [limits.max_model_len, limits.block_size, limits.blocks, limits.dtype, limits.max_num_seqs > 0],
        "whitespace": config.structured_outputs_config.disable_any_whitespace,
        "publishes": [config.kv_events_config.endpoint, config.kv_events_config.publisher],
        "limits_of": llm.limits_of(type("Llm", (), {"vllm_config": config})()) == limits,
    }


def _prompts() -> dict[str, Any]:
    from vllm.inputs import tokens_input

    plain, salted = tokens_input([1, 2]), tokens_input([1, 2], cache_salt="a")
    return {"prompts": [llm.token_prompt([1, 2], "") == plain, llm.token_prompt([1, 2], "a") == salted]}


def _events() -> dict[str, Any]:
    import msgspec
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

    def stored(**other: Any) -> BlockStored:
        same = {"block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
        return BlockStored(**(same | {"lora_id": None, "medium": "GPU", "lora_name": None} | other))

    first, second = stored(extra_keys=[("tenant",)]), stored(block_hashes=[8], parent_block_hash=7)
    ignored = [stored(block_size=4), stored(medium="CPU"), stored(lora_name="a"), stored(group_idx=1)]
    events = [first, second, *ignored, BlockRemoved(block_hashes=[7, 8], medium="GPU"), AllBlocksCleared()]
    read = kv_events.reader(2)(msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events)))
    return {"events": list(map(str, read))}


def _stats() -> dict[str, Any]:
    from vllm.v1.metrics.stats import RequestStateStats, SchedulerStats

    use: list[float] = []
    [logger] = stats.kv_use_loggers(use.append)
    recorder = logger(None)
    recorder.record(SchedulerStats(kv_cache_usage=0.25), None, engine_idx=0)
    recorder.record(None, None)
    recorder.log_engine_initialized()
    output = type("Output", (), {"metrics": RequestStateStats(num_preemptions=3)})()
    return {"kv_use": use, "preemptions": [stats.preemptions(output), stats.preemptions(object())]}


def _streams() -> dict[str, Any]:
    """Return how a request that writes three tokens is streamed.

    The state of vLLM's output processor is the reference.
    """
    from types import SimpleNamespace

    from transformers import AutoTokenizer
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor

    tokenizer = AutoTokenizer.from_pretrained(str(llama.make()))
    processor = OutputProcessor(tokenizer, log_stats=False)
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA)
    streams.seldom(params)
    fields = {
        "mm_features": None,
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
    }
    request = EngineCoreRequest(
        request_id="inner", prompt_token_ids=[5, 6], sampling_params=params, data_parallel_rank=None, **fields
    )
    request.external_req_id = "outer"
    queue: list[Any] = []
    processor.add_request(request, None, queue=SimpleNamespace(put=queue.append))
    outputs, untold = [], []
    for token in (12, 13, 14):
        processor.process_outputs([EngineCoreOutput("inner", [token])])
        outputs.append(bool(queue))
        queue.clear()
        if token == 13:
            llm_ = SimpleNamespace(output_processor=processor)
            untold = [streams.every_token(llm_, "outer"), streams.every_token(llm_, "other")]
    text = "".join(streams.texts(tokenizer, [5, 6], params, [12, 13, 14]))
    same = processor.request_states["inner"].detokenizer.output_text == text
    return {"streams": {"outputs": outputs, "untold": untold, "texts": same}}


def _request(name: str, query: str, depth: int, priority: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=1, extra_args={ours.KEY: (query, depth, "latency")})
    return Request(name, [1, 2], params, None, arrival_time=0.0, priority=priority)


def _scheduler() -> dict[str, Any]:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler

    running = [_request("A", "q1", 3, 0)]
    queue = scheduler.queue_class()(ours.TopologyOrder(), lambda: running)
    waiting = [_request(*one) for one in (("B", "q1", 1, 2), ("G", "q2", 1, 3), ("H", "q2", 3, 4))]
    queue.prepend_requests([*waiting, extra := _request("X", "q9", 9, 1)])
    queue.remove_requests([extra])
    listed, order = [one.request_id for one in queue], []
    while queue:
        assert queue.peek_request() is queue.peek_request()
        running.append(queue.pop_request())
        order.append(running[-1].request_id)
    classes = ours.TopologyScheduler, ours.TopologyAsyncScheduler
    return {
        "queue": [isinstance(queue, RequestQueue), listed, order, len(queue)],
        "classes": [f"{one.__module__}.{one.__name__}" for one in classes],
        "bases": [classes[0].__mro__[1] is Scheduler, classes[1].__mro__[1] is AsyncScheduler],
        "extra": [scheduler.extra(running[0], ours.KEY), scheduler.extra(running[0], "other")],
    }


def _undrafted() -> dict[str, Any]:
    """Return how steps with and without a drafted token run.

    That is: which logits count, by vLLM with speculation; what vLLM samples with where its steps are not hooked; and
    what it reports to its scheduler.
    """
    from types import SimpleNamespace

    import numpy as np
    import torch
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    numbers = np.arange(64, dtype=np.int32)
    runner: Any = SimpleNamespace(device="cpu", use_async_scheduling=False)
    runner._arange_scratch, runner.arange_np = numbers.copy(), numbers
    runner.input_ids = SimpleNamespace(gpu=torch.arange(64, dtype=torch.int32))
    for name in ("_get_cumsum_and_arange", "_calc_spec_decode_metadata"):
        setattr(runner, name, getattr(GPUModelRunner, name).__get__(runner))
    runner._sample = lambda logits, metadata: metadata
    runner.take_draft_token_ids = lambda: runner.drafts
    drafts.attach(SimpleNamespace(model_runner=_runner_of(runner)))
    report: dict[str, Any] = {"last": [], "sampled": [], "told": []}
    for drafted, ends in (([0, 0, 0], [1, 5, 6]), ([0, 2, 0], [1, 4, 5])):
        metadata = runner._calc_spec_decode_metadata(np.array(drafted, np.int32), np.array(ends, np.int32))
        report["last"].append(metadata.logits_indices.tolist() == [end - 1 for end in ends])
        report["sampled"].append(runner._sample(None, metadata) is None)
        runner.drafts = DraftTokenIds(["a", "b"], [[], [1] * max(drafted)])
        report["told"].append(runner.take_draft_token_ids() is not None)
    return report | {"steps": _steps(), "taken": _taken()}


def _steps() -> dict[str, list[list[Any]]]:
    """Return what happens in each step of several sequences of steps.

    That is: the speculative configuration of the runner while it runs and while it samples, the calls of the proposer,
    and the drafts that the runner has for its scheduler. `pauses` is the number of steps that the proposer leaves out.
    """
    from types import SimpleNamespace

    runner: Any = SimpleNamespace(use_async_scheduling=False, speculative_config="ours")
    runner.model_config = SimpleNamespace(is_hybrid=False)
    calls: list[Any] = []
    written = SimpleNamespace(sampled_token_ids=[[7], [8]])
    runner.execute_model = lambda output: calls.append(runner.speculative_config)
    runner.sample_tokens = lambda grammar: calls.append(runner.speculative_config) or written
    _runner_of(runner).input_batch = SimpleNamespace(req_ids=["a", "b"], num_tokens_no_spec=[3, 4], token_ids_cpu=[])
    proposer = runner.drafter
    proposer.pause, proposer.resume = lambda: proposer.pauses, lambda left: calls.append(f"{left} left")
    proposer.propose = lambda new, lengths, tokens: calls.append(f"asked of {new}, {lengths}") or proposer.drafts
    drafts.attach(SimpleNamespace(model_runner=runner))

    def step(names: str = "ab", pauses: int = 0, proposed: str = "", **drafted: list[int]) -> list[Any]:
        calls.clear()
        runner._draft_token_ids = runner._draft_token_req_ids = None
        proposer.pauses, proposer.drafts = pauses, [[], [9] if proposed else []]
        scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_spec_decode_tokens=drafted)
        runner.execute_model(scheduled)
        runner.sample_tokens(None)
        return [*calls, runner._draft_token_ids, runner._draft_token_req_ids, runner.speculative_config]

    return {
        "without drafts": [step(), step(proposed="b")],
        "with drafts": [step(b=[9])],
        "left out": [step(pauses=2), step(), step(), step()],
        "left out until others come": [step(pauses=2), step(), step("abc"), step()],
        "others instead": [step(pauses=1), step("ac")],
    }


def _taken() -> list[Any]:
    """Return what an executor in the worker's process takes: without drafts, with drafts, from an unknown runner."""
    from types import SimpleNamespace

    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    def taken(**names: Any) -> Any:
        worker = SimpleNamespace(model_runner=SimpleNamespace(**names))
        asked = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker), collective_rpc=lambda *_, **__: "all")
        return UniProcExecutor.take_draft_token_ids(cast("UniProcExecutor", asked))

    return [taken(_draft_token_req_ids=None), taken(_draft_token_req_ids=["a"]), taken()]


def _warmed() -> dict[str, Any]:
    """Return the sizes that are warmed up under several conditions.

    They go up to the largest step, are limited in time, stop while requests run, and stop once the runner refuses a
    size.
    """
    from types import SimpleNamespace

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def sizes(seconds: float = 60.0, requests: Any = (), minds: int = 0, workers: int = 1) -> list[int]:
        sizes_run: list[int] = []

        def run(size: int) -> tuple[list[int], None]:
            if size == minds:
                raise ValueError(size)
            return list(range(20)), None

        runner = SimpleNamespace(
            requests=dict(requests),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
            parallel_config=SimpleNamespace(world_size_across_dp=workers),
            model=SimpleNamespace(compute_logits=lambda hidden: sizes_run.append(len(hidden))),
            _dummy_run=run,
        )
        drafts.warm(SimpleNamespace(model_runner=runner), [2, 3, 16, 24], seconds)
        return sizes_run

    return {
        "all": sizes(),
        "in no time": sizes(-1.0),
        "while one runs": sizes(requests={"a": None}),
        "minded": sizes(minds=16),
        "with others": sizes(workers=2),
        "known": hasattr(GPUModelRunner, "_dummy_run"),
    }


def _runner_of(runner: Any) -> Any:
    """Add the attributes that `attach` reads."""
    from types import SimpleNamespace

    runner.requests, runner.input_batch = {}, SimpleNamespace(req_ids=[])
    runner._draft_token_ids = runner._draft_token_req_ids = None
    runner.drafter = SimpleNamespace(attach=lambda seen: None)
    return runner


def _drafts() -> dict[str, Any]:
    """Return the results of the drafting functions, compared with vLLM's own where those are right."""
    import torch
    from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
    from vllm.v1.sample import rejection_sampler

    args = {"model": str(llama.make()), "dtype": "float32", "max_model_len": 512, "block_size": 32}
    config = llm.engine_config(args | drafts.arguments(5, PROPOSER, WORKER))
    metrics = RequestSpecDecodeMetrics(num_spec_tokens=5, histogram=[1, 0, 2, 0, 0, 1], num_draft_tokens=15)
    drafts.mend()
    counts = torch.tensor([2, 2, 5], dtype=torch.int32)
    expanded = [
        rejection_sampler.expand_batch_to_tokens(torch.tensor(values), counts, 5, *replaced).tolist()
        for values, replaced in (([0.0, 0.5, 0.7], (0, 1)), ([3, 4, 5], ()))
    ]
    empty = torch.zeros((0, 4))
    return {
        "drafts": [drafts.max_draft_tokens(config), drafts.longest(config), config.speculative_config.method],
        "drafts made": type(create_proposer(config)).__name__,
        "undrafted": _undrafted(),
        "warmed": _warmed(),
        "encoded": _encoded(config),
        "verified": [drafts.verified(type("Output", (), {"spec_decode_metrics": one})()) for one in (metrics, None)],
        "expanded": expanded,
        "no token": rejection_sampler.apply_sampling_constraints(empty, counts, None) is empty,
    }


def _encoded(config: Any) -> list[Any]:
    """Return a text encoded by the shim and by the tokenizer itself, and the error where vLLM has no tokenizer."""
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(str(llama.make())).encode("a text", add_special_tokens=False)
    encoded = list(drafts.encoder(config)("a text"))
    config.model_config.skip_tokenizer_init = True
    try:
        drafts.encoder(config)
    except ValueError as none:
        return [encoded, expected, str(none)]
    return []


def create_proposer(config: Any) -> Any:
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    return create_custom_proposer(config)


def _when_missing() -> dict[str, Any]:
    """Return the messages, and the features that are off, when a name is missing in vLLM."""
    from vllm import envs
    from vllm.distributed import kv_events as events
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics import loggers
    from vllm.v1.sample import rejection_sampler

    report: dict[str, Any] = {}
    with _without(AsyncLLM, "from_vllm_config"):
        report["no engine"] = _error_of(lambda: llm.check_needed("llm"))
    with _without(events, "AllBlocksCleared"):
        report["no events"] = kv_events.lacking()
    with _without(rejection_sampler, "expand_batch_to_tokens"):
        report["no drafts"] = drafts.lacking()
    with _without(loggers, "StatLoggerBase"):
        report["no stats"] = [stats.lacking(), stats.kv_use_loggers(print)]
    with _without(envs.environment_variables, "VLLM_RPC_BASE_PATH"):
        report["no variable"] = processes.lacking()
    with _with(RequestQueue, "__abstractmethods__", RequestQueue.__abstractmethods__ | {"swap"}):
        report["another queue"] = [scheduler.lacking(), _error_of(lambda: ours.check_names("topology", "llm"))]
        report["not asked for"] = _error_of(lambda: ours.check_names("", "llm"))
    with _with(Scheduler, "__init__", lambda self: None):
        report["another scheduler"] = scheduler.lacking()
    return report


@contextmanager
def _without(owner: Any, name: str) -> Any:
    original = owner[name] if isinstance(owner, dict) else vars(owner)[name]
    take, put = (dict.__delitem__, dict.__setitem__) if isinstance(owner, dict) else (delattr, setattr)
    take(owner, name)
    try:
        yield
    finally:
        put(owner, name, original)


@contextmanager
def _with(owner: type, name: str, value: Any) -> Any:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _error_of(check: Any) -> str:
    try:
        check()
    except TeolaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
