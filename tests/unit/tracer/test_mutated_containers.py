"""Tests that calls which change containers are told from calls of stores and indexes that write."""

from __future__ import annotations

import ast

import pytest

from teola_plugin.tracer.functions.mutations import changes_container


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("notes.append(text)", True),
        ("notes.insert(0, text)", True),
        ("seen.add(text)", True),
        ("state.update(done=True)", True),
        ("index.insert(document)", False),
        ("index.insert(document=document)", False),
        ("collection.add(ids=ids, documents=documents)", False),
        ("store.add_documents(documents)", False),
        ("append(text)", False),
    ],
)
def test_call_changes_a_container_only_by_a_method_of_one(code: str, expected: bool) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert changes_container(call) is expected
