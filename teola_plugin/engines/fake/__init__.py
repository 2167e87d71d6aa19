"""Fake engines: deterministic answers after exactly the time a profile says. A product feature, not a test helper.

They need no model, no GPU and no data: enough to try `accelerate` on an app, to see where its time goes with another
machine's profile, to inject faults, and, in a `VirtualTimeLoop`, to simulate hours of load in seconds.
"""

from teola_plugin.engines.fake.base import FakeEngine, Faults, split_tokens
from teola_plugin.engines.fake.engines import (
    FakeEmbedder,
    FakeReranker,
    FakeTools,
    FakeWebSearch,
    bag_of_words,
    embed_words,
    fake_engines,
    own_score,
)
from teola_plugin.engines.fake.llm import Decoded, FakeLLM, answer_words
from teola_plugin.engines.fake.store import FakeStore

__all__ = [
    "Decoded",
    "FakeEmbedder",
    "FakeEngine",
    "FakeLLM",
    "FakeReranker",
    "FakeStore",
    "FakeTools",
    "FakeWebSearch",
    "Faults",
    "answer_words",
    "bag_of_words",
    "embed_words",
    "fake_engines",
    "own_score",
    "split_tokens",
]
