"""Tests of replicas: parts of one batch in parallel, values in order, shared weights."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from teola_plugin.engines.sentence_transformers.torch_worker import Replicas, twin


@pytest.fixture
def model() -> Any:
    from torch import nn

    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.note = ["own"]
    return made


def test_twin_model_shares_only_the_weights(model: Any) -> None:
    other = twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), other.buffers(), strict=True))
    assert other is not model and other.note == model.note and other.note is not model.note


@pytest.mark.parametrize(("threads", "replicas"), [(2, 2), (3, 3), (20, 8)])
def test_values_keep_the_order_of_the_items(model: Any, threads: int, replicas: int) -> None:
    made, items = Replicas(model, threads), ["x" * (n * 7 % 11) + str(n) for n in range(25)]
    assert made.count == replicas
    assert made.compute(lambda _, part: [text.upper() for text in part], items) == [text.upper() for text in items]
    assert made.compute(lambda _, part: part, items[:1]) == items[:1]
    made.close()


def test_replicas_compute_concurrently_on_separate_models(model: Any) -> None:
    made, together = Replicas(model, 3), threading.Barrier(3, timeout=30)

    def work(model: Any, part: list[str]) -> list[int]:
        together.wait()
        return [id(model)] * len(part)

    assert len(set(made.compute(work, ["a", "b", "c"]))) == 3
    made.close()


def test_failure_of_one_replica_fails_the_batch(model: Any) -> None:
    made = Replicas(model, 2)
    with pytest.raises(ValueError, match="invalid literal"):
        made.compute(lambda _, part: [int(text) for text in part], ["1", "2", "x", "4"])
    made.close()
