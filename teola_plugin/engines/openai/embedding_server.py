"""Engines of servers that embed or rerank.

`EmbeddingServer` speaks OpenAI's `/embeddings`, as vLLM, Text Embeddings Inference (TEI), Infinity, Ollama and
llama.cpp do, and carries requests that clients wrote in TEI's own form. `RerankingServer` speaks `/rerank` in Cohere's
form, as vLLM, Infinity, llama.cpp and Jina do, or in TEI's.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from teola_plugin.engines.openai.batching_server import BatchingServer
from teola_plugin.engines.openai.envelope import Envelope, without_credentials
from teola_plugin.engines.openai.http import root_of, text_of
from teola_plugin.engines.openai.wire import Headers, MalformedReply, parse_json, parse_object
from teola_plugin.errors import ConfigError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import EmbedText, Request, ScorePair, lone_surrogate

if TYPE_CHECKING:
    import httpx

# ------------------------------------------------------------ embedding


@dataclass(frozen=True, slots=True)
class WireEmbedding:
    """A request for vectors that a client of `openai` or `huggingface_hub` wrote; it is sent in that client's name."""

    body: str
    """JSON of the request."""
    inputs: int
    """Number of texts or token lists in it."""
    group: str = field(repr=False)
    """All that decides the vectors besides the inputs: address, headers, and the other fields of the body."""
    envelope: Envelope = field(repr=False)
    tei_url: str = ""
    """The address of a request in TEI's form (`{"inputs": [...]}`, answered by a list of vectors), without passwords.
    Empty for a request in OpenAI's form, which goes to `{base_url}/embeddings`."""

    @classmethod
    def of(cls, body: Mapping[str, Any], envelope: Envelope, tei_url: str = "") -> WireEmbedding:
        """Return the request for a body that a client wrote, with the group of requests that may be sent with it."""
        inputs_name = "inputs" if tei_url else "input"
        inputs = _input_list(body.get(inputs_name))
        kind = "tokens" if inputs and not isinstance(inputs[0], str) else "texts"
        other_fields = {name: value for name, value in body.items() if name != inputs_name}
        group = json.dumps([envelope.identity, kind, other_fields], sort_keys=True)
        return cls(json.dumps(body, ensure_ascii=False), len(inputs), group, envelope, tei_url)


@dataclass(frozen=True, slots=True)
class WireVectors:
    """The answer to a `WireEmbedding`."""

    response: str
    """JSON of the whole response."""
    headers: Headers = field(default=(), repr=False, compare=False)


def _input_list(value: Any) -> list[Any]:
    """Return the inputs of a request as a list: a text, or a list of tokens, is one input."""
    if isinstance(value, list) and not (value and all(type(one) is int for one in value)):
        return value
    return [value]


def embeds_in_tei_form(url: str, base_url: str) -> bool:
    """Return True for an address at which TEI embeds in its own form: its root, or `/embed` below it.

    `base_url`: the server's address as OpenAI's clients write it, with or without `/v1`.
    """
    root = root_of(base_url.rstrip("/")).rstrip("/")
    return without_credentials(url).rstrip("/") in (root, f"{root}/embed")


class EmbeddingServer(BatchingServer):
    """An engine that embeds texts on a server with OpenAI's `/embeddings`. Values are vectors, float[dimension].

    Attributes and arguments:
        base_url: The address as clients write it, e.g. `http://localhost:8000/v1`; a request goes to
            `{base_url}/embeddings`.
        model: A name that the server knows; by default the only model that it serves.
        dedicated: Declares that the server is there for your apps, and may get speculative requests.
        dimensions: The width of vectors, which is sent with each request; by default the model's own.
        encoding: The form in which vectors are sent: `float` (JSON numbers) or `base64` (float32, a third of the size).
        prompts: Texts that are put before each text, by role, e.g. `{"query": "query: ", "document": "passage: "}`.
        max_inputs: Maximum number of texts in an HTTP request; by default what the server says (TEI), else 32.
        max_connections: Maximum number of HTTP requests in flight.
        timeout: Maximum seconds between two signs of life.
        headers: Headers that are sent with each request.
        check: False if the start shall not check that the server serves the model.

    Raises:
        ConfigError: An option has a value that cannot be.
    """

    kinds = frozenset({PrimitiveKind.EMBEDDING})
    carries_embeddings = True
    """Requests of clients of `openai` and `huggingface_hub` go out as they wrote them: see `WireEmbedding`."""
    EXPECTED = "list of embeddings"

    def __init__(
        self,
        name: str = "embedder",
        *,
        base_url: str,
        model: str | None = None,
        dimensions: int | None = None,
        encoding: Literal["float", "base64"] = "float",
        prompts: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, base_url=base_url, model=model, **options)
        if encoding not in ("float", "base64"):
            raise ConfigError(f"{name}: encoding is {encoding!r}.", hint="give 'float' or 'base64'")
        if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
            raise ConfigError(f"{name}: dimensions is {dimensions!r}.", hint="give a whole number above 0")
        unknown = sorted(set(prompts or ()) - {"query", "document"})
        if unknown:
            raise ConfigError(f"{name}: prompts has {', '.join(unknown)}.", hint="give 'query', 'document', or both")
        self.encoding, self.prompts, self._dimensions = encoding, dict(prompts or {}), dimensions
        self.dimension = dimensions
        """Width of the vectors: as chosen, as the server says, or as its first answer has it; None before that."""

    def prompt_of(self, role: str) -> str:
        """Return what is put before texts of a role."""
        return self.prompts.get(role, "")

    def _adopt_facts(self, entry: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Take the width of vectors from llama.cpp's list of models, unless the user has chosen one."""
        self.dimension = self._dimensions
        meta = entry.get("meta")  # llama.cpp
        width = meta.get("n_embd") if isinstance(meta, Mapping) else None
        if self.dimension is None and type(width) is int and width > 0:
            self.dimension = width

    def _fault(self, request: Request) -> str:
        """Describe why a request cannot be embedded: wrong kind, no text, unknown role or invalid Unicode; empty if it
        can."""
        payload = request.payload
        if request.kind not in self.kinds or not isinstance(payload, EmbedText | WireEmbedding):
            return f"it embeds EmbedText, not {type(payload).__name__} ({request.kind.name})."
        if isinstance(payload, WireEmbedding):
            return ""
        if not isinstance(payload.text, str):
            return f"a text to embed must be a str, not {type(payload.text).__name__}."
        if payload.role not in ("query", "document"):
            return f"the role of a text must be 'query' or 'document', not {payload.role!r}."
        return lone_surrogate(payload.text)

    def _group(self, payload: Any) -> Hashable:
        return payload.group if isinstance(payload, WireEmbedding) else ""

    def _inputs(self, payload: Any) -> int:
        return payload.inputs if isinstance(payload, WireEmbedding) else 1

    async def _fetch(self, client: httpx.AsyncClient, payloads: Sequence[Any]) -> Sequence[Any]:
        """Embed the texts by one HTTP request and return a vector for each. Raise `EngineError` for an unusable reply.

        The first reply sets `dimension`; later vectors of another width are refused.
        """
        if isinstance(payloads[0], WireEmbedding):
            return await self._carry(client, payloads)
        body: dict[str, Any] = {
            "model": self.model,
            "input": [self.prompt_of(payload.role) + payload.text for payload in payloads],
            "encoding_format": self.encoding,
        }
        if self._dimensions is not None:
            body["dimensions"] = self._dimensions
        response = await self.post(client, "embeddings", body, None)
        entries = self._entries(response, len(payloads))
        vectors = [_vector(entry.get("embedding")) for entry in entries]
        widths = sorted({0 if vector is None else len(vector) for vector in vectors} - {self.dimension})
        if not widths:
            return vectors
        if 0 in widths:
            raise self.unusable(response, "an embedding is neither a list of numbers nor float32 in base64")
        if len(widths) > 1 or self.dimension is not None:
            expected = f", not {self.dimension}" if self.dimension is not None else ""
            raise self.unusable(response, f"its vectors have {' and '.join(map(str, widths))} dimensions{expected}")
        self.dimension = widths[0]
        return vectors

    def _entries(self, response: httpx.Response, count: int) -> list[Mapping[str, Any]]:
        """Return the entries of a reply in the order of the inputs. Raise EngineError if it has not one for each."""
        try:
            data = parse_object(text_of(response)).get("data")
        except MalformedReply as error:
            raise self.unusable(response, str(error)) from error
        if not isinstance(data, list) or not all(isinstance(entry, Mapping) for entry in data):
            raise self.unusable(response, "data is not a list of objects")
        if len(data) != count:
            raise self.unusable(response, f"it has {len(data)} vectors for {count} texts")
        positions = [entry.get("index", position) for position, entry in enumerate(data)]
        if sorted(positions, key=str) != sorted(range(count), key=str):
            raise self.unusable(response, f"its vectors have the indexes {positions[:8]}, not 0 to {count - 1}")
        return [entry for _, entry in sorted(zip(positions, data, strict=True), key=lambda pair: pair[0])]

    async def _carry(self, client: httpx.AsyncClient, payloads: Sequence[WireEmbedding]) -> list[WireVectors]:
        """Send requests of clients: one as it is, several as one, whose answer is divided among them."""
        if payloads[0].tei_url:
            return await self._carry_tei(client, payloads)
        bodies = [json.loads(payload.body) for payload in payloads]
        if len(payloads) == 1:
            response = await self.post(client, "embeddings", bodies[0], payloads[0])
            return [WireVectors(text_of(response), tuple(response.headers.multi_items()))]
        inputs = [one for body in bodies for one in _input_list(body["input"])]
        response = await self.post(client, "embeddings", {**bodies[0], "input": inputs}, payloads[0])
        entries, reply = self._entries(response, len(inputs)), parse_object(text_of(response))
        headers = tuple(response.headers.multi_items())
        shares = _divide_usage(reply.get("usage"), [sum(map(len, _input_list(body["input"]))) for body in bodies])
        answers, start = list[WireVectors](), 0
        for payload, usage in zip(payloads, shares, strict=True):
            part = enumerate(entries[start : start + payload.inputs])
            data = [{**entry, "index": position} if "index" in entry else entry for position, entry in part]
            answer = {**reply, "data": data} | ({} if usage is None else {"usage": usage})
            answers.append(WireVectors(json.dumps(answer, ensure_ascii=False), headers))
            start += payload.inputs
        return answers

    async def _carry_tei(self, client: httpx.AsyncClient, payloads: Sequence[WireEmbedding]) -> list[WireVectors]:
        """Send requests in TEI's form, as `_carry` does those in OpenAI's. Raise `EngineError` if the answer to several
        is not a list with an entry for each input."""
        bodies = [json.loads(payload.body) for payload in payloads]
        if len(payloads) == 1:
            response = await self.post(client, payloads[0].tei_url, bodies[0], payloads[0])
            return [WireVectors(text_of(response), tuple(response.headers.multi_items()))]
        inputs = [one for body in bodies for one in _input_list(body["inputs"])]
        response = await self.post(client, payloads[0].tei_url, {**bodies[0], "inputs": inputs}, payloads[0])
        try:
            entries = parse_json(text_of(response))
        except MalformedReply as error:
            raise self.unusable(response, str(error)) from error
        if not isinstance(entries, list) or len(entries) != len(inputs):
            raise self.unusable(response, f"it is not a list of {len(inputs)} vectors")
        headers = tuple(response.headers.multi_items())
        answers, start = list[WireVectors](), 0
        for payload in payloads:
            part = entries[start : start + payload.inputs]
            answers.append(WireVectors(json.dumps(part, ensure_ascii=False), headers))
            start += payload.inputs
        return answers


def _divide_usage(usage: Any, lengths: Sequence[int]) -> list[dict[str, Any] | None]:
    """Return each caller's part of the tokens that a server counted for all, by the lengths of their inputs."""
    if not isinstance(usage, Mapping):
        return [None] * len(lengths)
    total, bounds = max(1, sum(lengths)), [0, *accumulate(lengths)]
    parts: list[dict[str, Any] | None] = []
    for start, end in pairwise(bounds):
        parts.append(
            {
                name: count * end // total - count * start // total if type(count) is int else count
                for name, count in usage.items()
            }
        )
    return parts


def _vector(value: Any) -> array[float] | None:
    """Return a vector as it came: doubles of JSON, float32 of base64; None for anything else."""
    if isinstance(value, str):
        try:
            vector = array("f", base64.b64decode(value, validate=True))
        except (binascii.Error, ValueError):
            return None
        if sys.byteorder == "big":
            vector.byteswap()
        return vector
    if not isinstance(value, list) or not all(type(one) in (int, float) for one in value):
        return None
    return array("d", value)


# ------------------------------------------------------------ reranking


class RerankingServer(BatchingServer):
    """An engine that scores pairs of a query and a text on a server with `/rerank`. Higher is better.

    The texts that one query is compared with go in one HTTP request, also those of several callers.

    Attributes and arguments:
        base_url: The address in front of `/rerank`, e.g. `http://localhost:8000/v1`, `https://api.cohere.com/v2`, or
            `http://localhost:8080` for TEI.
        model: A name that the server knows; by default the only model that it serves.
        form: `cohere` (`{"query", "documents"}`; also vLLM, Infinity, llama.cpp and Jina) or `tei` (`{"query",
            "texts"}`); by default TEI's for a server that answers `/info` as TEI does, else Cohere's.
        max_inputs: Maximum number of texts in an HTTP request; by default what the server says (TEI), else 32.
        dedicated, max_connections, timeout, headers, check: As for `EmbeddingServer`.

    Raises:
        ConfigError: An option has a value that cannot be.
    """

    kinds = frozenset({PrimitiveKind.RERANKING})
    EXPECTED = "list of scores"

    def __init__(
        self,
        name: str = "reranker",
        *,
        base_url: str,
        model: str | None = None,
        form: Literal["cohere", "tei"] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, base_url=base_url, model=model, **options)
        if form not in (None, "cohere", "tei"):
            raise ConfigError(f"{name}: form is {form!r}.", hint="give 'cohere' or 'tei', or leave it out")
        self.form = form

    def _adopt_facts(self, entry: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        self.form = self.form or ("tei" if info else "cohere")

    def _fault(self, request: Request) -> str:
        """Describe why a request cannot be scored: wrong kind, no text or invalid Unicode; empty if it can."""
        payload = request.payload
        if request.kind not in self.kinds or not isinstance(payload, ScorePair):
            return f"it scores ScorePair, not {type(payload).__name__} ({request.kind.name})."
        for side in (payload.query, payload.text):
            if not isinstance(side, str):
                return f"both sides of a pair must be a str, not {type(side).__name__}."
        return lone_surrogate(payload.query) or lone_surrogate(payload.text)

    def _group(self, payload: Any) -> Hashable:
        return str(payload.query)

    async def _fetch(self, client: httpx.AsyncClient, payloads: Sequence[Any]) -> Sequence[Any]:
        """Score texts against one query by one HTTP request, and return a score for each. Raise `EngineError` for bad
        replies."""
        query, texts = payloads[0].query, [payload.text for payload in payloads]
        if self.form == "tei":
            body: dict[str, Any] = {"query": query, "texts": texts}
        else:
            body = {"model": self.model, "query": query, "documents": texts}
        response = await self.post(client, "rerank", body, None)
        scores: list[float | None] = [None] * len(texts)
        for entry in self._results(response):
            position, score = entry.get("index"), entry.get("relevance_score", entry.get("score"))
            is_new = isinstance(position, int) and 0 <= position < len(texts) and scores[position] is None
            if position is None or not is_new or type(score) not in (int, float) or not math.isfinite(score):
                raise self.unusable(response, f"a result has the index {position!r} and the score {score!r}")
            scores[position] = float(score)
        if None in scores:
            counted = len(texts) - scores.count(None)
            raise self.unusable(response, f"it has {counted} scores for {len(texts)} texts")
        return scores

    def _results(self, response: httpx.Response) -> list[Mapping[str, Any]]:
        """Return a reply's entries, a bare list from TEI or the field `results` from others. Raise `EngineError`."""
        try:
            reply = parse_json(text_of(response))
        except MalformedReply as error:
            raise self.unusable(response, str(error)) from error
        results = reply.get("results") if isinstance(reply, Mapping) else reply
        if not isinstance(results, list) or not all(isinstance(entry, Mapping) for entry in results):
            raise self.unusable(response, "results is not a list of objects")
        return results
