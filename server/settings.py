"""Settings that `teola serve` reads beside the engines of a pool's YAML: the server, its keys, and its apps.

::

    engines: {llm: {kind: vllm, model: ...}}
    apps:
      support: {object: "my_app.chains:rag", input: question}
    server:
      port: 8000
      keys:
        - {name: team-a, hash: "sha256:...", tenant: team-a, requests_per_minute: 600}
"""

from __future__ import annotations

from ipaddress import ip_address
from os.path import normpath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from teola_plugin.adapters.named_objects import LangGraphFile
from teola_plugin.cluster.config import EngineConfig, PoolConfig
from teola_plugin.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine reach the host."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def host_without_port(header: str) -> str:
    """Return the host in a `Host` header, without the port.

    It is in lower case, and an IPv6 address is without its brackets. The result is compared with the names by which the
    server may be addressed; an empty header gives an empty host.
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


MB = 1 << 20


class UrlSettings(BaseModel):
    """Addresses that may be fetched for a client that gives one instead of a document."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    hosts: tuple[str, ...] = Field(min_length=1)
    """Names that may be asked: `docs.example.org`, `*.example.org` for those below one, `*` for any."""
    schemes: tuple[Literal["https", "http"], ...] = Field(("https",), min_length=1)
    """Schemes of addresses that may be fetched."""
    ports: tuple[int, ...] = Field((443,), min_length=1)
    """Ports of addresses that may be fetched."""
    redirects: int = Field(3, ge=0, le=20)
    """Redirects that are followed, each checked like the first address."""
    seconds: float = Field(10.0, gt=0)
    """Seconds for the whole fetch, redirects included."""

    @field_validator("hosts")
    @classmethod
    def _normalize_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of hosts in lower case. Raise `ValueError` for what is neither a name, `*.name` nor `*`."""
        names = tuple(name.strip().rstrip(".").lower() for name in hosts)
        for name in names:
            rest = name.removeprefix("*.")
            if name != "*" and (not rest or "*" in rest or "/" in rest or ":" in rest):
                raise ValueError(f"{name!r:.80} is no name of a host: write docs.example.org, *.example.org or *")
        return names


class DocumentSettings(BaseModel):
    """Limits on documents, and how many are read and stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    max_bytes: int = Field(8 * MB, ge=1)
    """Bytes of one document."""
    max_pages: int = Field(500, ge=1)
    """Pages of a PDF."""
    max_characters: int = Field(4_000_000, ge=1)
    """Characters of the text that is read from a document."""
    seconds: float = Field(20.0, gt=0)
    """Seconds that reading a document may take."""
    memory: int = Field(1024 * MB, ge=128 * MB)
    """Bytes of memory that reading a document may take."""
    at_once: int = Field(2, ge=1)
    """Documents that are read at a time, each in a process of its own."""
    waiting: int = Field(32, ge=0)
    """Documents that wait to be read; more get 429."""
    per_query: int = Field(16, ge=1)
    """Documents of one query."""
    keep: float = Field(86_400.0, gt=0)
    """Seconds for which uploaded documents are stored."""
    max_kept: int = Field(256 * MB, ge=1)
    """Bytes of uploaded documents that one tenant keeps at a time."""
    urls: UrlSettings | None = None
    """Addresses that may be fetched for a client. None: every address is refused."""


_NAME = r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,126}$"


class KeySettings(BaseModel):
    """One API key: its tenant, and its limits. The settings hold only its hash: `teola key NAME` makes both."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=_NAME)
    """For logs; never the key itself."""
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$", repr=False)
    """The hash that `teola key NAME` prints beside the key."""
    tenant: str = Field("", max_length=128)
    """The tenant with which its requests share prefixes, outputs and queries; by default the key's name."""
    operator: bool = False
    """True if it may see the whole pool: its figures, its versions, its load."""
    weight: float = Field(1.0, gt=0, le=1000)
    """Share of its queries among those of the pool."""
    models: tuple[str, ...] = ()
    """Models that it may ask; empty for all."""
    max_seconds: float | None = Field(None, gt=0)
    """The latest deadline of its requests, in seconds."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Requests that it may begin in a minute; more get 429."""
    concurrent: int | None = Field(None, ge=1)
    """Requests under way at a time."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Tokens of prompts and answers together, charged when a request has ended."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Tokens of one answer; the engine is not asked for more."""
    uploads_per_minute: float | None = Field(None, gt=0)
    """Documents that are read for it."""
    max_upload: int | None = Field(None, ge=1)
    """Bytes of one document; at most the server's."""
    max_kept: int | None = Field(None, ge=1)
    """Bytes of all documents that its tenant keeps; at most the server's."""


class AppSettings(BaseModel):
    """An app that is served as a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    object: str = Field(pattern=r"^([\w.]+:[\w.]+|.+\.json(:.+)?)$")
    """`package.module:object`: a Runnable, a compiled graph, a query or chat engine, a workflow; or a function that
    gives one, with the argument `pool` if it has one of that name. Or `langgraph.json:graph`: a graph of that file."""
    input: str = ""
    """The key under which a Runnable takes the text of the last message. Empty: detected."""
    output: str = ""
    """The key of its output that is the answer. Empty: detected."""
    documents: str = ""
    """The key under which it takes the texts of documents, as a list. Empty: of a workflow, it is found out; others
    take none."""
    stream_node: str = ""
    """The node of a graph whose tokens are the answer. Empty: the answer comes when the graph has ended."""
    bind: dict[str, str] = Field(default_factory=dict)
    """`package.module:object` of models of its own, and the engine that serves each."""
    read_only: list[str] = Field(default_factory=list)
    """Names of an agent's tools that change nothing, or `mcp:SERVER`: see `accelerate(..., read_only=[...])`."""
    prompt_cache: bool = False
    """True if requests to providers say what to cache: see `accelerate(..., prompt_cache=True)`."""
    repeatable: bool = False
    """True if a query that a crash has interrupted may be run again: only if the app writes nothing anywhere."""
    checkpoints: bool = False
    """Of a graph without a checkpointer: its checkpoints are kept in the server's store, so that its queries go on from
    the last one after a crash, and may stop to ask somebody."""
    description: str = ""
    """A sentence about the app, for `/v1/models` and the server's pages."""
    example: str = ""
    """A text to ask it, for the commands that `teola serve` prints and the page to try it."""
    goal: float | None = Field(None, gt=0)
    """Seconds that its queries should take, unless the caller says otherwise."""


class TracingSettings(BaseModel):
    """The OpenTelemetry collector that gets the spans of requests, queries and primitives."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    endpoint: str = Field(pattern=r"^https?://[^/@\s]+(/[^?#\s]*)?$")
    """Address of the collector, e.g. `http://127.0.0.1:4317`."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    """Form of OTLP; each has a package of its own, `opentelemetry-exporter-otlp-proto-grpc` and `-http`."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    """Headers for the collector, e.g. its key."""
    service: str = Field("teola", min_length=1)
    """`service.name` of the spans."""
    share: float = Field(1.0, ge=0, le=1)
    """Share of requests that are traced if their callers have not decided."""


class ServerSettings(BaseModel):
    """Addresses, keys and limits of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    host: str = "127.0.0.1"
    """The address to listen on. One that other machines reach needs `keys`."""
    port: int = Field(8000, ge=0, le=65535)
    """The port to listen on; 0 takes any free one."""
    certificate: str = ""
    """The file of the TLS certificate, in PEM form. Empty: HTTP without TLS."""
    private_key: str = ""
    """The file of the certificate's private key, in PEM form."""
    hosts: tuple[str, ...] = ()
    """Names by which browsers and clients may address it; those of loopback where it has no keys. Empty: any."""
    keys: tuple[KeySettings, ...] = ()
    """API keys of clients. Without any, the server listens on loopback alone."""
    max_body: int = Field(8 << 20, ge=1024)
    """Bytes of one request."""
    documents: DocumentSettings = DocumentSettings.model_validate({})
    """Limits on documents that clients give."""
    max_requests: int = Field(256, ge=1)
    """Requests that are accepted at a time, waiting ones included; more get 429."""
    max_tokens: int = Field(4_000_000, ge=1)
    """Tokens of all accepted requests, of prompts and answers as far as known; more get 429."""
    max_batch: int = Field(2048, ge=1)
    """Texts of one request for embeddings or reranking."""
    token_ids: dict[str, str] = Field(default_factory=dict)
    """Model -> tiktoken's name of the encoding of token ids that it is sent instead of text."""
    goal: float | None = Field(None, gt=0)
    """Seconds that a query should take where nobody says otherwise. None: no query is refused for its time."""
    joined_idle: float = Field(30.0, gt=0)
    """Seconds without a request after which a query that requests join ends."""
    store: str = Field("embedded", repr=False)  # a DSN may hold a password
    """Where submitted queries are stored: `embedded` (a PostgreSQL of the server's own), a DSN, or `memory`."""
    data: str = ""
    """The folder of the embedded store; empty for one of the user's own, by the name of the pool."""
    keep: float = Field(86_400.0, gt=0)
    """Seconds for which the results of submitted queries are stored."""
    drain: float = Field(30.0, ge=0)
    """Seconds that requests under way have to end when the server is told to stop."""
    log: Literal["json", "text", "off"] = "text"
    """One line for each request; `off`: warnings and errors alone."""
    log_details: bool = False
    """True to log messages of exceptions, in which an app's code may repeat prompts."""
    tracing: TracingSettings | None = None
    """The OpenTelemetry collector that gets spans. None: no spans are sent."""

    @field_validator("log", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads it

    @model_validator(mode="after")
    def _check_consistency(self) -> ServerSettings:
        """Raise `ValueError` for settings that contradict each other, or open a server without keys to others."""
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("TLS needs both certificate and private_key")
        for field in ("name", "hash"):
            values = [getattr(key, field) for key in self.keys]
            if len(set(values)) < len(values):
                raise ValueError(f"two keys have the same {field}")
        if not self.keys and not is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached from elsewhere: give it keys (teola key NAME)")
        return self


class ServiceConfig(PoolConfig):
    """A pool's file with the settings of `teola serve`."""

    engines: dict[str, EngineConfig] = Field(default_factory=dict)
    server: ServerSettings = ServerSettings.model_validate({})
    """Addresses, keys and limits of `teola serve`."""
    apps: dict[str, AppSettings] = Field(default_factory=dict)
    """The apps that `teola serve` serves, by name."""
    langgraph: str = ""
    """The path of a `langgraph.json`, from the current folder: each of its graphs is an app."""

    @model_validator(mode="after")
    def _check_names(self) -> ServiceConfig:
        """Raise `ValueError` for a name that is both an app and an engine, and if there is nothing to serve."""
        if both := sorted(set(self.apps) & set(self.engines)):
            raise ValueError(f"{both[0]} is an app and an engine: models have one name each")
        if not self.engines and not self.apps and not self.langgraph:
            raise ValueError("there is nothing to serve: it needs engines, apps or langgraph")
        return self

    def with_graphs(self) -> ServiceConfig:
        """Return the settings with the graphs of `langgraph` as apps. One that is an app already keeps its settings.

        Raise `RegistrationError` for a file that cannot be read, `ConfigError` for a name that stands for another app.
        """
        if not self.langgraph:
            return self
        apps = dict(self.apps)
        for name, entry in LangGraphFile.read(self.langgraph).graphs.items():
            fields = {"object": f"{self.langgraph}:{name}", "description": entry.description}
            settings = AppSettings.model_validate(fields)
            if name in self.engines or normpath(apps.get(name, settings).object) != normpath(settings.object):
                hint = f"name the engine or app {name!r} otherwise, or give it the object {settings.object}"
                raise ConfigError(f"{self.langgraph} has a graph {name!r}, and so has the pool's file.", hint=hint)
            apps.setdefault(name, settings)
        return self.model_copy(update={"apps": apps})
