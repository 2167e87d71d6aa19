"""Tests of every use of vLLM's private names, with the installed vLLM and with the name missing."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.private_names import ROOT, Code, touches

from teola_plugin.engines.bundled import llama
from teola_plugin.engines.vllm import VllmEngine, host
from teola_plugin.engines.vllm.drafts.worker import DraftsWorker
from teola_plugin.engines.vllm.link import Link, NotReady, Ready, Setup
from teola_plugin.engines.vllm.process import group_members
from teola_plugin.errors import ConfigError, EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Prompt, Request, Sampling, Warmup
from teola_plugin.shims.vllm import drafts, kv_events, llm, processes, scheduler, versions

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

CHECKED = {
    "versions": {"number", "is_supported", "missing", "unset"},
    "llm": {"check_needed", "platform", "engine_config", "make", "limits", "limits_of", "token_prompt"},
    "processes": {"lacking", "sockets_in", "socket_folder", "bound_to", "in_one", "worker_in_core", "fork_the_core"},
    "stats": {"lacking", "kv_use_loggers", "preemptions"},
    "kv_events": {"lacking", "publishing", "reader"},
    "drafts": {
        "lacking",
        "arguments",
        "max_draft_tokens",
        "longest",
        "warm",
        "verified",
        "proposer_of",
        "attach",
        "mend",
        "encoder",
        "spare",
    },
    "streams": {"lacking", "seldom", "every_token", "texts"},
    "scheduler": {"tested", "lacking", "extra", "scheduler_class", "queue_class"},
}
"""Functions of the shim that are called below or in `support.vllm_names`, all of them."""
API = frozenset({"vllm", "vllm.sampling_params"})
"""Modules of vLLM that other files may import from."""


def test_every_function_of_the_vllm_shim_is_checked() -> None:
    found = {path.stem for path in (ROOT / "teola_plugin/shims/vllm").glob("*.py")} - {"__init__"}
    assert found == CHECKED.keys()
    for name, functions in CHECKED.items():
        module = import_module(f"teola_plugin.shims.vllm.{name}")
        public = inspect.getmembers(module, inspect.isfunction)
        assert {each for each, one in public if one.__module__ == module.__name__ and each[0] != "_"} == functions


def test_only_shims_use_private_names() -> None:
    """This covers vLLM, torch, transformers, sentence-transformers, psycopg and Ray."""
    weights = {"teola_plugin/engines/bundled/reranker.py": ["_embeddings"]}  # the end of a weight's name
    folders = ["teola_plugin/engines", "teola_plugin/cluster", "teola_plugin/cli", "teola_plugin/pool.py"]
    assert list(map(str, touches(folders, allowed=weights))) == []


def test_only_shims_import_vllm_internals() -> None:
    modules = {path: found for path, found in Code.read().modules.items() if not path.startswith("teola_plugin/shims/")}
    inside = [f"{path}: {name}" for path, found in modules.items() for name in _of_vllm(found.tree) if name not in API]
    assert inside == []


def _of_vllm(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.split(".")[0] == "vllm")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what `support.vllm_names` reports about the installed vLLM. It takes 10 s, mostly for imports."""
    path = tmp_path_factory.mktemp("vllm") / "names.json"
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error::DeprecationWarning:teola_plugin", "-m", "support.vllm_names", str(path)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(path.read_text())


def test_installed_vllm_has_all_private_names(found: Any) -> None:
    assert found["lacking"] == [] and found["needed"] == "" and found["platform"]


def test_configuration_fields_of_vllm_are_read(found: Any) -> None:
    assert found["limits"] == [512, 32, 0, "float32", True] and found["limits_of"]
    assert found["whitespace"] and found["publishes"] == ["ipc:///x", "zmq"]


def test_prompts_equal_those_of_the_vllm_renderer(found: Any) -> None:
    assert found["prompts"] == [True, True]


def test_events_of_other_caches_are_ignored(found: Any) -> None:
    first = kv_events.Stored((7,), (1, 2), None, "tenant")
    then = kv_events.Stored((8,), (1, 2), 7, "")
    assert found["events"] == list(map(str, (first, then, kv_events.Removed((7, 8)), kv_events.Cleared())))


def test_stat_logger_reports_the_share_of_cache_in_use(found: Any) -> None:
    assert found["kv_use"] == [0.25]


def test_step_without_drafted_tokens_runs_without_speculation(found: Any) -> None:
    """The logits that count are then those of each request's last token, with speculation as without."""
    undrafted = found["undrafted"]
    assert (undrafted["last"], undrafted["sampled"], undrafted["told"]) == ([True, False], [True, False], [False, True])
    assert undrafted["taken"] == [None, "all", "all"]


def test_proposer_runs_after_undrafted_steps_unless_skipped(found: Any) -> None:
    drafted, left_out = (
        [None, None, "asked of [[7], [8]], [3, 4]", None, None, "ours"],
        [None, None, None, None, "ours"],
    )
    assert found["undrafted"]["steps"] == {
        "without drafts": [drafted, [*drafted[:3], [[], [9]], ["a", "b"], "ours"]],
        "with drafts": [["ours", "ours", None, None, "ours"]],
        "left out": [drafted, left_out, left_out, drafted],
        "left out until others come": [drafted, left_out, ["1 left", *drafted], drafted],
        "others instead": [drafted, ["1 left", *drafted]],
    }


def test_step_sizes_are_warmed_on_idle_cpu_engines_only(found: Any) -> None:
    every, some = ([2, 3, 16], [2, 3]) if found["platform"] == "cpu" else ([], [])
    nothing: dict[str, list[int]] = {"in no time": [], "while one runs": [], "with others": []}
    assert found["warmed"] == {"all": every, "minded": some, "known": True, **nothing}


def test_unread_request_resumes_output_when_a_reader_joins(found: Any) -> None:
    """`RequestState` as vLLM makes it: its first token is an output, the next is none, then each of them is."""
    assert found["streams"] == {"outputs": [True, False, True], "untold": [[13], []], "texts": True}


def test_preemptions_of_a_request_are_counted(found: Any) -> None:
    assert found["preemptions"] == [3, 0]


def test_vllm_creates_the_proposer_and_counts_accepted_tokens(found: Any) -> None:
    assert found["drafts"] == [5, 512, "custom_class"] and found["drafts made"] == "DraftProposer"
    assert found["verified"] == [[15, 9], [0, 0]]
    assert found["encoded"][0] and found["encoded"][0] == found["encoded"][1] and "tokenizer" in found["encoded"][2]


def test_vllm_sampling_faults_with_drafts_are_patched(found: Any) -> None:
    """On the CPU its own expansion leaves what was in memory; of a step without a token it takes the maximum."""
    assert found["expanded"][0] == pytest.approx([1.0, 1.0, 0.7, 0.7, 0.7])
    assert found["expanded"][1] == [3, 3, 5, 5, 5]
    assert found["no token"]


def test_proposer_attaches_only_to_a_runner_with_expected_fields() -> None:
    got: list[drafts.Runner] = []
    drafter = SimpleNamespace(attach=got.append)
    params = SimpleNamespace(temperature=0.7, extra_args=None)
    state = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2])
    runner = SimpleNamespace(requests={"a": state}, input_batch=SimpleNamespace(req_ids=["a"]), drafter=drafter)
    worker = SimpleNamespace(model_runner=runner)
    assert drafts.proposer_of(worker) is drafter and drafts.attach(worker)
    assert got[0].names() == ["a"] and got[0].runs("a") and not got[0].runs("b")
    assert not got[0].request_facts("a").greedy and not got[0].request_facts("b").greedy
    assert drafts.attach(worker) and len(got) == 1, "it has it already"
    del runner.input_batch.req_ids
    assert not drafts.attach(worker)


def test_worker_attaches_the_proposer_to_its_runner(caplog: pytest.LogCaptureFixture) -> None:
    """As in vLLM, our class is an additional base of a worker's class."""

    class Worker:
        def __init__(self) -> None:
            self.model_runner: Any = None

    class Injected(Worker, DraftsWorker):
        pass

    got: list[drafts.Runner] = []
    made = Injected()
    made.model_runner = SimpleNamespace(
        requests={}, input_batch=SimpleNamespace(req_ids=[]), drafter=SimpleNamespace(attach=got.append)
    )
    assert len(got) == 1 and not caplog.messages
    made.model_runner = SimpleNamespace()
    assert len(got) == 1 and "nothing is drafted" in caplog.text


def test_queue_subclasses_vllm_queue_and_orders_requests(found: Any) -> None:
    """The order is that of `test_llm_scheduler`: with A of q1 running, H comes before B."""
    assert found["queue"] == [True, ["B", "G", "H"], ["H", "B", "G"], 0]
    assert found["extra"] == [["q1", 3, "latency"], None]


def test_vllm_finds_the_scheduler_classes_by_their_names(found: Any) -> None:
    module = "teola_plugin.engines.vllm.scheduler"
    assert found["classes"] == [f"{module}.TopologyScheduler", f"{module}.TopologyAsyncScheduler"]
    assert found["bases"] == [True, True]


@pytest.mark.vllm
def test_started_engine_has_requested_limits_and_processes(session_llm: SessionLlm) -> None:
    """`make` starts it, its worker lives in its core (`in_one`), and it tells its limits."""
    engine = session_llm.engine
    assert engine.profile.max_request_size == 4096 and engine.profile.cache_tokens
    assert engine.versions()["dtype"] == "float32"
    assert engine._host is not None
    titles = [_title(pid) for pid in group_members(engine._host.process.pid)]
    assert any("EngineCore" in title for title in titles) and not any("Worker" in title for title in titles), titles


@pytest.mark.vllm
def test_requests_log_no_deprecation_warnings(session_llm: SessionLlm) -> None:
    async def ask() -> list[Any]:
        payloads = (Generate(Prompt(text="one"), Sampling(max_tokens=2)), Warmup(Prompt(text="two " * 40)))
        batch = [Request(f"deprecated-{at}", PrimitiveKind.PREFILLING, one) for at, one in enumerate(payloads)]
        return [result async for result in session_llm.engine.execute(batch) if isinstance(result, Done)]

    assert len(session_llm.run(ask())) == 2
    log_lines = session_llm.engine.log.read_text("utf-8").splitlines()
    assert [
        line for line in log_lines if "deprecated" in line and ("teola_plugin" in line or "(MainProcess" in line)
    ] == []


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


# ---------------------------------------------------------------- versions and processes


@pytest.mark.parametrize(
    ("version", "served", "replaced"),
    [("0.25.9", False, False), ("0.26.0", True, False), ("0.32.1.dev3+cpu", True, True), ("0.33.0", False, False)],
)
def test_vllm_versions_are_compared_by_number(version: str, served: bool, replaced: bool) -> None:
    assert (versions.is_supported(version), scheduler.tested(version)) == (served, replaced)
    assert versions.number("dev") is None and versions.is_supported("dev") and not scheduler.tested("dev")


def test_missing_names_are_found_by_probing() -> None:
    assert versions.missing("json:dumps", "json:JSONDecoder.decode") == ()
    wrong = ("json:dump_all", "json:JSONDecoder.guess", "no_such_module:name")
    assert versions.missing("json:dumps", *wrong) == wrong
    assert versions.unset(json.JSONDecoder, "strict", "lenient") == ("json.decoder:JSONDecoder().lenient",)


def test_environment_variables_of_vllm_keep_user_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("VLLM_RPC_BASE_PATH", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert processes.sockets_in(tmp_path) == {"VLLM_RPC_BASE_PATH": str(tmp_path)}
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    assert processes.socket_folder() == str(tmp_path)
    assert processes.bound_to("0-1", 2) == {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "OMP_NUM_THREADS": "2"}
    assert processes.bound_to("0|1", 0) == {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    assert processes.in_one() == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert processes.worker_in_core() and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert not processes.worker_in_core(), "what the user has set stands"


def test_only_the_engine_core_is_forked() -> None:
    """In a process of its own: what is registered at a fork cannot be taken back."""
    code = (
        "import os\nfrom teola_plugin.shims.vllm import processes\nprocesses.fork_the_core()\n"
        "print(os.environ['VLLM_WORKER_MULTIPROC_METHOD'], flush=True)\n"
        "if os.fork(): os.wait()\nelse: print(os.environ['VLLM_WORKER_MULTIPROC_METHOD'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ran.stdout.split() == ["fork", "spawn"], ran.stderr


# ---------------------------------------------------------------- where a name is missing


def test_missing_engine_class_raises_with_the_install_command(found: Any) -> None:
    assert "EngineUnavailable: the installed vLLM has no" in found["no engine"]
    assert (
        "AsyncLLM.from_vllm_config" in found["no engine"]
        and "Next: pip install 'vllm>=0.26,<0.33'" in found["no engine"]
    )


def test_features_with_missing_names_are_disabled(found: Any) -> None:
    assert found["no events"] == ["vllm.distributed.kv_events:AllBlocksCleared"]
    assert found["no stats"] == [["vllm.v1.metrics.loggers:StatLoggerBase.record"], []]
    assert found["no drafts"] == ["vllm.v1.sample.rejection_sampler:expand_batch_to_tokens"]
    assert found["no variable"] == ["VLLM_RPC_BASE_PATH"]


def test_untested_scheduler_of_vllm_is_not_replaced(found: Any) -> None:
    names, refused = found["another queue"]
    assert names == ["vllm.v1.core.sched.request_queue:RequestQueue.swap"]
    assert refused.startswith("ConfigError") and "RequestQueue.swap" in refused and "leave `scheduler` out" in refused
    assert found["not asked for"] == ""
    assert found["another scheduler"] == [
        f"vllm.v1.core.sched.scheduler:Scheduler().{n}" for n in ("waiting", "running")
    ]


def test_unreadable_cache_events_are_not_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "lacking", lambda: ("vllm.distributed.kv_events:BlockStored",))
    lacking: dict[str, Any] = {}
    setup = Setup("llm", str(llama.make()), tell_cache=True)
    args = host._arguments(setup, llm.Platform(True, "cpu"), lacking)
    assert "kv_events_config" not in args
    assert list(lacking.values()) == [("vllm.distributed.kv_events:BlockStored",)]


READY = Ready(512, 4, 512, 32, 1024, "cpu", {"vllm": "0.32.7"}, lacking=("its cache is not known (no a, b)",))


async def greeted(frame: Ready | NotReady) -> VllmEngine:
    """Return an engine whose host sends this message first."""
    ours, theirs = socket.socketpair()
    other = await Link.connect(theirs)
    other.send(frame)
    engine = VllmEngine("llm", "model", scheduler="topology")
    try:
        link = await engine._greet(SimpleNamespace(socket=ours, log_tail=lambda: ""))  # type: ignore[arg-type]
        await link.close()
    finally:
        await other.close()
    return engine


async def test_disabled_features_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "teola_plugin"):
        engine = await greeted(READY)
    assert engine.profile.max_request_size == 512
    assert caplog.messages == ["llm: vLLM 0.32.7 is not as expected: its cache is not known (no a, b)"]


async def test_unsupported_explicit_setting_raises_config_error() -> None:
    refused = host._not_ready(ConfigError("the scheduler does not fit.", hint="leave it out"))
    with pytest.raises(ConfigError, match="does not fit") as caught:
        await greeted(refused)
    assert caught.value.hint == "leave it out"
    with pytest.raises(EngineUnavailable, match="did not start: no engine") as unavailable:
        await greeted(host._not_ready(EngineUnavailable("no engine.", hint="install another")))
    assert unavailable.value.hint == "install another"
    with pytest.raises(EngineUnavailable, match="did not start: KeyError"):
        await greeted(host._not_ready(KeyError("x")))
