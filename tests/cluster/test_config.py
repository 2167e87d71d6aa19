"""Tests of a pool's YAML: every error names its line and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from teola_plugin.cluster.config import Autoscale, EngineConfig, PoolConfig
from teola_plugin.cluster.connection import check_address
from teola_plugin.cluster.deployment.engine_factory import build_engine
from teola_plugin.cluster.names import engine_spec
from teola_plugin.errors import ConfigError

GOOD = """\
name: mine
engines:
  llm:
    kind: vllm
    model: some/model
    replicas: 2
    gpus: 2
    cores: ["0", 1]
    engine_args: {tensor_parallel_size: 2, quantization: fp8, enable_lora: true}
  embedder: {kind: embedding, autoscale: {max_replicas: 3}}
  store: {kind: pgvector, dsn: postgresql://localhost/x}
"""


def test_complete_pool_file_is_parsed() -> None:
    config = PoolConfig.parse(GOOD)
    assert config.name == "mine" and list(config.engines) == ["llm", "embedder", "store"]
    llm = config.engines["llm"]
    assert llm.cores == ("0", "1") and llm.engine_args["tensor_parallel_size"] == 2
    assert config.engines["embedder"].autoscale == Autoscale(max_replicas=3)
    assert config.engines["embedder"].max_replicas == 3


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("engines:\n  llm: {kind: vllm}\n", 2, "needs model"),
        ("engines:\n  llm:\n    kind: vlm\n    model: x\n", 3, "'vllm'"),
        ("engines:\n  a: {kind: fake}\n  b:\n    kind: fake\n    replicas: 0\n", 5, "greater than or equal to 1"),
        ("engines:\n  a:\n    kind: fake\n    replicsa: 2\n", 4, "replicsa: there is no such setting"),
        ("engines:\n  a:\n    kind: fake\n    policy: fifo\n", 4, "topology-aware"),
        ("engines:\n  a: {kind: fake}\nname: no spaces here\n", 3, "pattern"),
        ("engines:\n  a:\n    model: x\n", 2, "kind or factory"),
        ("engines:\n  a:\n    kind: fake\n    autoscale: {min_replicas: 5, max_replicas: 2}\n", 4, "max_replicas"),
        ("engines:\n  a:\n    kind: fake\n    engine_args: {x: 1}\n", 2, "vLLM's"),
        ("engines:\n  a: {kind: fake, cores: ['0'], replicas: 2}\n", 2, "cores name 1"),
        (
            "engines:\n  a: {kind: vllm, model: m,\n    drafts: sometimes}\n",
            3,
            "a.drafts: unknown value of drafts 'sometimes'",
        ),
        ("engines:\n  a:\n    kind: vllm\n    model: m\n    drafts: {tokens: 0}\n", 5, "tokens is 0; give 1 to 64"),
        ("engines:\n  a:\n    kind: vllm\n    model: m\n    drafts: {tokens: many}\n", 5, "tokens is 'many'"),
        ("engines:\n  a:\n    kind: vllm\n    model: m\n    drafts: {token: 3}\n", 5, "did you mean 'tokens'?"),
        ("engines:\n  a: {kind: fake, drafts: auto}\n", 2, "drafts are vLLM's"),
        ("engines:\n  a: {kind: openai, base_url: x, drafts: auto}\n", 2, "options: {drafts: true}"),
        ("engines:\n  a: {kind: vllm, model: m, drafts: auto, options: {drafts: auto}}\n", 2, "leave one of them out"),
        ("engines:\n  a: {kind: vllm, model: m, options: {drafts: {tokens: 65}}}\n", 2, "tokens is 65"),
        ("engines:\n  a: {kind: websearch,\n    options: {service: brave, api_key: x}}\n", 2, "environment variable"),
        ("engines:\n  a: {kind: fulltext, dsn: embedded}\n", 2, "needs options: {documents: ...}"),
        ("engines:\n  a: {kind: fulltext, options: {documents: x}}\n", 2, "needs dsn"),
        ("engines:\n  a: {kind: tools}\n", 2, "needs options: {tools: ...}"),
        ("engines:\n  a: {kind: embedding_server, model: m}\n", 2, "needs base_url"),
        ("engines:\n  a: {kind: reranking_server, model: m}\n", 2, "needs base_url"),
        ("engines: {}\n", 1, "engines: it is empty"),
        ("engines:\n  a: [1, 2\n", 3, "expected"),
        ("just text", 1, "no settings"),
        ("", 1, "no settings"),
    ],
)
def test_fault_is_reported_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig.parse(text, "pool.yaml")
    assert f"pool.yaml, line {line}:" in str(caught.value) and says in str(caught.value)
    assert caught.value.hint


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("engines:\n  a: {kind: fake, cpus: -1}\n  b: {kind: nothing}\n")
    with pytest.raises(ConfigError) as caught:
        PoolConfig.read(path)
    assert "a.cpus" in str(caught.value) and "b.kind" in str(caught.value)


def test_missing_pool_file_raises_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        PoolConfig.read(tmp_path / "nowhere.yaml")


def test_ray_client_address_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="6379"):
        check_address("ray://somewhere:10001")


def test_custom_factory_builds_the_engine() -> None:
    text = "engines:\n  mine:\n    factory: teola_plugin.engines.fake.engines:FakeReranker\n"
    config = PoolConfig.parse(text)
    assert build_engine(engine_spec("mine", config.engines["mine"]), 0).name == "mine"
    for wrong in ("teola_plugin.engines.fake.engines:Nothing", "no.such.module:x"):
        spec = {**engine_spec("mine", config.engines["mine"]), "factory": wrong}
        with pytest.raises(ConfigError, match="importable"):
            build_engine(spec, 0)


def test_fake_engine_without_like_raises() -> None:
    config = PoolConfig.parse("engines: {x: {kind: fake}}")
    with pytest.raises(ConfigError, match="like"):
        build_engine(engine_spec("x", config.engines["x"]), 0)


def test_credentials_are_not_shown() -> None:
    text = "engines:\n  a: {kind: openai, base_url: 'http://me:secret@there/v1'}\n"
    text += "  b: {kind: pgvector, dsn: 'postgresql://me:secret@there/x'}\n"
    config = PoolConfig.parse(text)
    assert config.engines["a"].base_url == "http://me:secret@there/v1"
    assert "secret" not in repr(config) + str(config)


WRONG: dict[str, list[Any]] = {
    "kind": ["vlm", 1, [], {}],
    "factory": ["no_colon", 1, ["a:b"]],
    "model": [1, [], {}, None, True],
    "dsn": [1, []],
    "base_url": [1, {}],
    "replicas": ["two", 0, 1.5, [], {}, None, True, 99999],
    "cpus": [-1, "x", [], None, True],
    "gpus": [-1, 1.5, "x", [], None, False],
    "cores": ["2", "0-3", 2, [["a"]], {"a": 1}, [None], ["x"], ["3-1"], [1.5], True],
    "resources": ["x", [], {"a": "b"}, {"a": -1}, {1: 2}, None],
    "engine_args": ["x", [], 1, None],
    "drafts": ["sometimes", [], 1, True, {"tokens": 0}, {"tokens": "8"}, {"no": 1}, {1: 2}],
    "options": ["x", [], 1, None],
    "policy": ["fifo", 1, [], None],
    "max_queued": [0, "x", [], 1.5, True],
    "autoscale": [
        "x",
        [],
        1,
        {},
        {"max_replicas": "a"},
        {"min_replicas": 3, "max_replicas": 1},
        {"max_replicas": 2, "up_after_s": "x"},
        {"max_replicas": 1, "no": 1},
    ],
}


@pytest.mark.parametrize("field", EngineConfig.model_fields)
def test_value_of_a_wrong_type_is_reported_in_one_line(field: str) -> None:
    for value in WRONG[field]:
        engine = {"kind": "vllm", "model": "m", field: value}
        if field == "factory":
            del engine["kind"]
        with pytest.raises(ConfigError) as caught:
            PoolConfig.parse(yaml.safe_dump({"engines": {"llm": engine}}), "pool.yaml")
        message = str(caught.value)
        assert message.startswith("pool.yaml, line ") and "\n" not in message, (value, message)
        assert field in message and "Input should" not in message and "pydantic" not in message, (value, message)
        assert "docs/reference-settings.md" in caught.value.hint


def test_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        PoolConfig.parse("engines: {store: {kind: pgvector, dsn: 12345678}}")
    assert "12345678" not in str(caught.value)


def test_duplicate_setting_raises() -> None:
    text = "engines:\n  llm: {kind: fake}\n  llm: {kind: fake, replicas: 2}\n"
    with pytest.raises(ConfigError, match=r"pool.yaml, line 3: llm stands there twice"):
        PoolConfig.parse(text, "pool.yaml")
    with pytest.raises(ConfigError):
        PoolConfig.parse("engines: &x\n  a: *x\n", "pool.yaml")  # it holds itself


def test_binary_pool_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        PoolConfig.read(path)
    with pytest.raises(ConfigError, match="directory"):
        PoolConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("setting", "tokens"), [("auto", 16), ("off", None), ('"off"', None), ("{tokens: 8}", 8), ("{}", 16)]
)
def test_draft_settings_of_an_engine_are_parsed(setting: str, tokens: int | None) -> None:
    config = PoolConfig.parse(f"engines:\n  llm: {{kind: vllm, model: some/model, drafts: {setting}}}\n")
    made: Any = build_engine(engine_spec("llm", config.engines["llm"]), 0)
    assert (made._setup.drafts.tokens if made._setup.drafts else None) == tokens
    assert made._setup.drafts_on_cuda == (setting != "auto")


def test_search_and_tool_engines_are_built_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAVE_SEARCH_API_KEY", "hidden")
    (tmp_path / "oats.txt").write_text("Oats are sown in spring.")
    config = PoolConfig.parse(f"""
engines:
  web: {{kind: websearch, options: {{service: brave, max_requests: 2}}}}
  own: {{kind: websearch, base_url: "http://localhost:8888", options: {{dedicated: true}}}}
  texts: {{kind: fulltext, dsn: "host=nowhere", options: {{documents: {tmp_path}}}}}
  tools: {{kind: tools, options: {{tools: ["json:dumps", "os:getpid"], read_only: [dumps]}}}}
""")
    made = {name: build_engine(engine_spec(name, one), 0) for name, one in config.engines.items()}
    assert made["web"].versions() == {"service": "brave", "url": "https://api.search.brave.com"}
    assert made["web"].profile.max_requests == 2 and not made["web"].profile.dedicated and made["own"].profile.dedicated
    assert made["texts"].versions()["documents"] == "1" and "hidden" not in repr(config) + repr(vars(made["web"]))
    assert [(tool.name, tool.read_only) for tool in made["tools"].tools.values()] == [  # type: ignore[attr-defined]
        ("dumps", True),
        ("getpid", False),
    ]


def test_tool_that_cannot_be_imported_raises_with_its_name() -> None:
    config = EngineConfig(kind="tools", options={"tools": ["json:nothing"]})
    with pytest.raises(ConfigError, match="the tool 'json:nothing' cannot be imported"):
        build_engine(engine_spec("tools", config), 0)
