"""Tests of the list of classes that take several sync calls at the same time."""

from __future__ import annotations

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from teola_plugin import accelerate
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.errors import RegistrationError
from tests.support.own_leaves import Chat, Notes, SyncChat


def test_concurrent_option_matches_objects_by_identity_and_subclasses() -> None:
    one, other = Notes(), Notes()
    assert ThreadSafety((one,)).allows(one)
    assert not ThreadSafety((one,)).allows(other)
    assert ThreadSafety((SyncChat,)).allows(Chat())
    assert not ThreadSafety((Chat,)).allows(SyncChat())


def test_listed_classes_are_allowed_and_their_subclasses_are_not() -> None:
    class Mine(InMemoryVectorStore):
        pass

    embedding = DeterministicFakeEmbedding(size=3)
    assert ThreadSafety().allows(InMemoryVectorStore(embedding))
    assert not ThreadSafety().allows(Mine(embedding))
    assert not ThreadSafety().allows(embedding)


def test_concurrent_option_is_kept_for_parts() -> None:
    notes = Notes()
    options = Options.of(None, None, None, "auto", None, 0.0, [notes])
    assert options.concurrent == (notes,)
    assert options.inside().threads.allows(notes)


@pytest.mark.parametrize("wrong", [Notes(), "a model", Notes])
def test_concurrent_option_that_is_no_list_raises_with_a_hint(wrong: object) -> None:
    with pytest.raises(RegistrationError, match=r"concurrent= takes a list .* Next: write concurrent=\["):
        accelerate(Notes(), concurrent=wrong)  # type: ignore[arg-type]
