"""What the five applications are asked with: questions, and uploads of a stated length."""

from __future__ import annotations

from typing import Any

from benchmarks.apps.pipelines import human
from benchmarks.rag.apps import document

PARAGRAPHS = {"naive_rag": 50, "advanced_rag": 50, "contextual_retrieval": 6}
"""Of an upload, two chunks each. Contextual retrieval asks its model about every chunk."""


def given(app: str, number: int) -> dict[str, Any]:
    """The input of one query."""
    question = f"What does report {number} say about the terms that have to change first?"
    if app == "agent":
        return human(question)
    if app == "search_engine":
        return {"question": question}
    return {"question": question, "document": document(number, PARAGRAPHS[app])}
