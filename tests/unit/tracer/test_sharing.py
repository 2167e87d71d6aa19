"""Tests of which functions have calls that share no mutable data, as far as their source shows it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from httpx import Client

from teola_plugin.tracer.functions.lookup import shares_nothing

MODEL = "small"
HEADERS = {"x-model": MODEL}
_calls: list[str] = []


def measure(text: str) -> list[float]:
    return [float(len(text)), 1.0]


def log(text: str) -> list[float]:
    _calls.append(text)
    return []


class Embedding:
    """A model with methods that share nothing, and others that share something."""

    def __init__(self) -> None:
        self.url = "http://localhost"
        self.count = 0
        self.cache: dict[str, list[float]] = {}
        self.client = Client(timeout=1)
        self.helper: Any = object()

    def client_of_each_call(self, text: str) -> list[float]:
        """A docstring."""
        with Client(base_url=self.url) as client:
            reply = client.post("/embeddings", json={"input": [text], "model": MODEL})
        vectors = [item["embedding"] for item in reply.json()["data"]]
        return vectors[0]

    def shared_client(self, text: str) -> Any:
        vectors: list[Any] = []
        for item in self.client.post(f"{self.url}/embeddings", json={"input": [text]}).json()["data"]:
            vectors.append(item["embedding"])
        return vectors[0] if vectors else None

    def module_functions(self, text: str) -> Any:
        time.sleep(0.01)
        try:
            reply = httpx.post(self.url, json={"input": text}, headers={"x-model": MODEL})
        except ValueError:
            raise RuntimeError(f"no answer to {text}") from None
        return json.loads(reply.json()["data"])

    def own_method(self, text: str) -> Any:
        return self.client_of_each_call(text) + measure(text)

    def counts(self, text: str) -> Any:
        self.count += 1
        return measure(text)

    def sets(self, text: str) -> Any:
        self.url = text
        return measure(text)

    def keeps(self, text: str) -> Any:
        self.cache[text] = measure(text)
        return self.cache[text]

    def shares_a_dictionary(self, text: str) -> Any:
        found = self.cache
        return found

    def asks_a_helper(self, text: str) -> Any:
        return self.helper.post(text)

    def passes_itself_on(self, text: str) -> Any:
        return str(self)

    def changes_its_client(self, text: str) -> Any:
        return self.client.headers.update({"x-text": text})

    def closes_its_client(self, text: str) -> Any:
        with self.client as client:
            return client.post(text)

    def calls_a_value(self, text: str) -> Any:
        change = self.client.headers.update
        return change({"x-text": text})

    def reads_a_shared_dictionary(self, text: str) -> Any:
        return HEADERS.get(text)

    def writes_a_global(self, text: str) -> Any:
        return log(text)

    def has_a_shared_default(self, text: str, seen: list[str] = []) -> Any:  # noqa: B006
        seen.append(text)
        return seen

    def calls_unknown_code(self, text: str) -> Any:
        return pytest.importorskip(text)

    def defines_code(self, text: str) -> Any:
        return [*map(lambda one: one, text)]

    def calls_itself(self, text: str) -> Any:
        return self.calls_itself(text[1:])


@pytest.mark.parametrize("name", ["client_of_each_call", "shared_client", "module_functions", "own_method"])
def test_a_method_of_constants_and_clients_shares_nothing(name: str) -> None:
    assert shares_nothing(getattr(Embedding(), name))


SHARING = [name for name in list(vars(Embedding))[list(vars(Embedding)).index("counts") :] if not name.startswith("_")]


@pytest.mark.parametrize("name", SHARING)
def test_method_that_may_keep_state_between_calls_shares(name: str) -> None:
    assert not shares_nothing(getattr(Embedding(), name))


@pytest.mark.parametrize("function", [log, len, lambda text: text])
def test_functions_with_shared_lists_or_without_source_share(function: Callable[..., Any]) -> None:
    assert not shares_nothing(function)


def test_a_function_of_its_arguments_shares_nothing() -> None:
    assert shares_nothing(measure)


def test_a_client_that_was_replaced_by_another_object_shares() -> None:
    embedding = Embedding()
    embedding.client = object()  # type: ignore[assignment]
    assert not shares_nothing(embedding.shared_client)
