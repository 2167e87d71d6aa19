"""The pool's YAML: which engines there are, how many replicas of each, and what they may use.

::

    name: default
    engines:
      llm:
        kind: vllm
        model: meta-llama/Llama-3.1-8B-Instruct
        replicas: 2
        gpus: 1
        engine_args: {max_model_len: 8192}
      embedder: {kind: embedding, model: BAAI/bge-large-en-v1.5}
      store: {kind: pgvector, dsn: "postgresql://user@host/database"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from teola_plugin.engines.devices.assignment import parse_cores
from teola_plugin.errors import ConfigError, TeolaError, missing_package
from teola_plugin.observe.spans import Price
from teola_plugin.scheduling import POLICIES

try:
    import yaml
    from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
except ModuleNotFoundError as error:
    raise missing_package("a pool's YAML file", error.name or "yaml", "yaml", "ray") from error

Kind = Literal[
    "vllm",
    "embedding",
    "reranking",
    "pgvector",
    "openai",
    "embedding_server",
    "reranking_server",
    "websearch",
    "fulltext",
    "tools",
    "fake",
]


class Autoscale(BaseModel):
    """Lets the number of replicas follow the queue: one more while more than `queued_per_replica` requests wait for
    each."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    min_replicas: int = Field(1, ge=1)
    """The smallest number of replicas."""
    max_replicas: int = Field(ge=1)
    """The largest number of replicas."""
    queued_per_replica: float = Field(8.0, gt=0)
    """Requests that may wait for each replica before one is added."""
    up_after_s: float = Field(5.0, ge=0)
    """Seconds that the queue must be long before a replica is added."""
    down_after_s: float = Field(60.0, ge=0)
    """Seconds without a queue before a replica is removed."""

    @model_validator(mode="after")
    def _check_limits(self) -> Autoscale:
        """Raise ValueError if the smallest number of replicas is above the largest."""
        if self.min_replicas > self.max_replicas:
            limits = f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}"
            raise ValueError(f"{limits}: write max_replicas at least as large")
        return self


class EngineConfig(BaseModel):
    """The settings of one engine, and the resources of each of its replicas."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind | None = None
    """The kind of engine. Each one is a class: see the table of kinds."""
    factory: str = Field("", pattern=r"^$|^[\w.]+:[\w.]+$")
    """Instead of `kind`: `package.module:callable`, called with the engine's name and `options`."""
    model: str = ""
    """A folder or hub name (vllm; embedding and reranking, which have small defaults); `bundled` for the small model
    that comes with the package (vllm, reranking); a name that the server knows (openai, embedding_server,
    reranking_server)."""
    dsn: str = Field("", repr=False)  # it may hold a password
    """PostgreSQL connection (pgvector, fulltext), or `embedded` for a server beside the replica."""
    base_url: str = Field("", repr=False)
    """An OpenAI-compatible server (openai, embedding_server), the address in front of `/rerank` (reranking_server), a
    SearXNG (websearch)."""
    replicas: int = Field(1, ge=1, le=1024)
    """Number of copies of the engine."""
    cpus: float = Field(0.0, ge=0)
    """Logical Ray CPUs that each replica reserves."""
    gpus: float = Field(0.0, ge=0)
    """Ray GPUs of each replica: it computes on them. With tensor parallelism, as many as it has ranks; a part (0.5) is
    the same share of a card's memory."""
    cores: tuple[str, ...] = ()
    """Cores of each replica in turn, e.g. `["0-3", "4-7"]` (CPU builds only)."""
    resources: Mapping[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Custom Ray resources of each replica, e.g. to tie it to a kind of node."""
    engine_args: Mapping[str, Any] = Field(default_factory=dict)
    """Passed on to vLLM as they are: tensor_parallel_size, quantization, enable_lora, max_model_len, ..."""
    drafts: Any = None
    """vLLM only: `auto`, `off`, or options of `Drafts`. None: what `options` say, or the engine's own default."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine's class."""
    policy: str = "topology-aware"
    """The order in which requests form batches: `topology-aware`, `critical-path`, `shortest-remaining`,
    `earliest-deadline`, `per-invocation` or `throughput-oriented`."""
    max_queued: int = Field(10_000, ge=1)
    """Requests that may wait; more raise `EngineOverloaded`."""
    autoscale: Autoscale | None = None
    """Lets the number of replicas follow the queue. None: the number stays."""

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        """Return the name of a batch policy as it is.

        Raise ValueError, which pydantic reports for the field, for a name that no policy has.
        """
        if value not in POLICIES:
            raise ValueError(f"there is no policy {value!r}; use one of {', '.join(POLICIES)}")
        return value

    @field_validator("drafts")
    @classmethod
    def _normalize_drafts(cls, value: Any) -> Any:
        """Check the setting of drafts and return it, with `off` in place of False: YAML reads a bare `off` as False.

        Raise ValueError if the value does not describe drafts. None stays None.
        """
        if value is not None:
            _check_drafts_value(value)
        return "off" if value is False else value

    @field_validator("replicas", "cpus", "gpus", "max_queued", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any) -> Any:
        """Refuse True and False where a number is expected: pydantic would read them as 1 and 0.

        Raise ValueError, which pydantic reports for the field.
        """
        if isinstance(value, bool):
            raise ValueError("it must be a number")
        return value

    @field_validator("cores", mode="before")
    @classmethod
    def _check_cores(cls, value: Any) -> Any:
        """Return the CPU cores of each replica as a tuple of texts. Raise ValueError for anything but a list."""
        if not isinstance(value, list | tuple):
            raise ValueError('it must be a list with one text for each replica, e.g. ["0-3", "4-7"]')
        return tuple(map(_checked_cores, value))

    @model_validator(mode="after")
    def _check_engine(self) -> EngineConfig:
        """Raise ValueError if the engine's settings contradict each other, or one that its kind needs is missing."""
        if (self.kind is None) == (not self.factory):
            raise ValueError("give either kind or factory")
        servers = dict.fromkeys(("openai", "embedding_server", "reranking_server"), "base_url")
        required_settings = {"vllm": "model", "pgvector": "dsn", "fulltext": "dsn", **servers}
        required = required_settings.get(self.kind or "", "")
        if required and not getattr(self, required):
            raise ValueError(f"an engine of kind {self.kind} needs {required}")
        if self.engine_args and self.kind != "vllm":
            raise ValueError(f"engine_args are vLLM's; give a {self.kind or 'factory'} engine options")
        self._check_drafts()
        self._check_options()
        if self.cores and len(self.cores) < self.max_replicas:
            raise ValueError(f"cores name {len(self.cores)} sets for {self.max_replicas} replicas")
        if self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"gpus is {self.gpus:g}: give a part of one GPU, or whole ones")
        memory_share = self.memory_share
        if memory_share is not None and 0 < self.gpus < memory_share:
            raise ValueError(
                f"gpu_memory_utilization {memory_share:g} is more than gpus: {self.gpus:g} reserves of the card"
            )
        return self

    def _check_drafts(self) -> None:
        """Raise ValueError if `drafts` is set for an engine that is not vLLM's, is not valid, or is set twice."""
        if self.kind == "vllm" and "drafts" in self.options:
            _check_drafts_value(self.options["drafts"])
        if self.drafts is None:
            return
        if self.kind != "vllm":
            server = ": a server of vLLM's has options: {drafts: true}" if self.kind == "openai" else ""
            raise ValueError(f"drafts are vLLM's; a {self.kind or 'factory'} engine has none{server}")
        if "drafts" in self.options:
            raise ValueError("drafts stand beside the options and in them: leave one of them out")

    def _check_options(self) -> None:
        """Raise ValueError for options that an engine lacks, and for those that do not belong in a file."""
        if self.kind == "websearch" and "api_key" in self.options:
            raise ValueError("a key does not belong in this file: set the service's environment variable on the nodes")
        for kind, option in (("fulltext", "documents"), ("tools", "tools")):
            if self.kind == kind and not self.options.get(option):
                raise ValueError(f"an engine of kind {kind} needs options: {{{option}: ...}}")

    @property
    def memory_share(self) -> float | None:
        """The share of a card's memory that is set for each replica; None if none is.

        vLLM has it among its `engine_args`, the other kinds of engines have it among their `options`. 1.0 is a whole
        card.
        """
        share = (self.engine_args if self.kind == "vllm" else self.options).get("gpu_memory_utilization")
        return float(share) if isinstance(share, int | float) else None

    @property
    def max_replicas(self) -> int:
        return max(self.replicas, self.autoscale.max_replicas if self.autoscale else 0)


def _check_drafts_value(value: Any) -> None:
    """Raise `ValueError` if the value does not describe drafts."""
    from teola_plugin.engines.drafts.options import drafts_of

    try:
        drafts_of(value)
    except TeolaError as error:
        raise ValueError(f"{error.message.rstrip('.')}; {error.hint}") from None


def _checked_cores(value: Any) -> str:
    """Return the cores of one replica as text. Raises `ValueError`."""
    text = str(value)
    try:
        cores = not isinstance(value, bool | float) and parse_cores(text)
    except ValueError:
        cores = ()
    if not cores:
        raise ValueError(f'{value!r} names no cores; write e.g. "0-3" or "0,2"')
    return text


class PriceConfig(BaseModel):
    """The price of a model, in dollars per million tokens; see `teola_plugin.Price`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    input: float = Field(ge=0, allow_inf_nan=False)
    """Price of the tokens of prompts."""
    output: float = Field(ge=0, allow_inf_nan=False)
    """Price of the tokens of answers."""
    cached_input: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Price of prompt tokens that the provider found in its cache; by default that of the others."""

    @field_validator("input", "output", "cached_input", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any) -> Any:
        """Refuse True and False, which pydantic would read as 1 and 0. Raise ValueError."""
        if isinstance(value, bool):
            raise ValueError("it must be a number")
        return value


class PoolConfig(BaseModel):
    """The settings of one pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """The name by which `EnginePool.connect(pool=...)` and `teola status` find the pool."""
    engines: dict[str, EngineConfig] = Field(min_length=1)
    """The engines by name. Apps and clients use these names as models."""
    prices: dict[str, PriceConfig] | None = None
    """The price of each model by its name, in dollars per million tokens: accelerated apps report what queries cost."""
    server: Any = None
    """Settings of `teola serve`, which reads them from the same file and checks them (see `server.settings`)."""
    apps: Any = None
    """Apps of `teola serve`, likewise."""
    langgraph: Any = None
    """A `langgraph.json` whose graphs `teola serve` serves as apps, likewise."""

    @property
    def price_table(self) -> dict[str, Price] | None:
        """The prices as `accelerate(..., prices=...)` takes them; None if the file has none."""
        if self.prices is None:
            return None
        return {name: Price(one.input, one.output, one.cached_input) for name, one in self.prices.items()}

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the file's content. Raises `ConfigError`, which names file, line and remedy."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}.", hint="give the path of a pool's YAML file"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8: {error.reason}.", hint="save it as UTF-8") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "pool") -> Self:
        """Return the content of YAML text. `source` leads the messages. Raises `ConfigError`."""
        try:
            root, data = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(_syntax_error(source, error), hint="mend the YAML there") from None
        if duplicates := list(_duplicate_keys(root, source)):
            raise ConfigError("\n".join(duplicates), hint="leave one of them out: only the last would count")
        if not isinstance(data, dict):
            raise ConfigError(f"{source}, line 1: it holds no settings.", hint="begin with `engines:` (see the docs)")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError("\n".join(_faults(source, root, error)), hint=_REMEDY) from None


_SECRET_SETTINGS = frozenset({"dsn", "base_url", "hash", "headers"})
"""Settings that may hold a password, also inside."""
_REMEDY = "correct these lines; docs/reference-settings.md lists every setting"


def _syntax_error(source: str, error: yaml.YAMLError) -> str:
    """Return the message for a YAML text that cannot be parsed: its source, the line (from 1) and the problem."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{source}, line {mark.line + 1 if mark else 1}: {problem}."


def _duplicate_keys(node: Any, source: str, ancestors: tuple[Any, ...] = ()) -> Iterator[str]:
    """Yield a message for each key that stands twice in one mapping, which YAML accepts.

    `ancestors` are the nodes around this one; aliases may make a node its own ancestor.
    """
    if any(node is other for other in ancestors):
        return
    if isinstance(node, yaml.SequenceNode):
        for other in node.value:
            yield from _duplicate_keys(other, source, (*ancestors, node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name and name in seen:
                yield f"{source}, line {key.start_mark.line + 1}: {name} stands there twice."
            seen.add(name)
            yield from _duplicate_keys(value, source, (*ancestors, node))


_MESSAGES = {
    "string_type": "it must be text",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "dict_type": "it must hold settings, `name: value`",
    "mapping_type": "it must hold settings, `name: value`",
    "model_type": "it must hold settings, `name: value`",
    "extra_forbidden": "there is no such setting",
    "missing": "it is missing",
    "too_short": "it is empty",
}
"""Messages for those of pydantic's faults that a user would not understand."""


def _explain(fault: Any) -> str:
    """Return the text of one fault that pydantic reports, in words that a user of the YAML file understands."""
    if fault["type"] == "string_pattern_mismatch" and fault["loc"][-1] == "factory":
        return "it must be of the form package.module:callable"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return _MESSAGES.get(fault["type"], message.replace("Input should be", "it must be"))


def _faults(source: str, root: Any, error: ValidationError) -> list[str]:
    """Return a message for each fault that pydantic found in a pool's file: source, line, setting and reason.

    `root` is the parsed YAML tree, which has the line numbers. Values of settings that may hold a password are not
    shown.
    """
    messages = []
    for fault in error.errors():
        path = tuple(key for key in fault["loc"] if not (isinstance(key, str) and key.startswith("function-")))
        is_shown = isinstance(fault["input"], str | int | float | bool | None) and fault["type"] != "missing"
        got_text = f" (got {fault['input']!r})" if is_shown and not _SECRET_SETTINGS & set(path) else ""
        where = ".".join(str(key) for key in path if key != "[key]") or "the file"
        messages.append(f"{source}, line {_line(root, path)}: {where}: {_explain(fault)}{got_text}.")
    return messages


def _line(node: Any, path: tuple[Any, ...]) -> int:
    """Return the line, from 1, of the deepest node on the path that exists."""
    line: int = node.start_mark.line + 1
    for key in path:
        if isinstance(node, yaml.MappingNode):
            pairs = [(k, v) for k, v in node.value if k.value == str(key)]
            if not pairs:
                break
            name, node = pairs[0]
            line = name.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            break
    return line
