"""Tests that `bind=` routes LlamaIndex objects wherever they are called, and that engines can share one list."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Document, SummaryIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate

from teola_plugin import accelerate
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool


def engine_of(llm: MockLLM, template: PromptTemplate | None = None) -> Any:
    index = SummaryIndex.from_documents([Document(text="lambs eat grass"), Document(text="walls need lime")])
    given = {} if template is None else {"text_qa_template": template}
    return index.as_query_engine(llm=llm, response_mode="accumulate", **given)


def test_bound_llm_in_a_function_mapping_uses_the_engine(pool: EnginePool) -> None:
    llm = MockLLM(max_tokens=4)
    shortened_by: list[str] = []

    def shortened(**given: Any) -> str:
        shortened_by.append(llm.complete("shorten").text)
        return "short"

    template = PromptTemplate("{context_str} {query_str}", function_mappings={"context_str": shortened})
    engine = engine_of(llm, template)
    fast = accelerate(engine, pool=pool, bind=[(llm, "llm")])
    engine.query("why?")
    by_the_model, shortened_by[:] = set(shortened_by), []
    assert "short" in str(fast.query("why?"))
    assert shortened_by
    assert not set(shortened_by) & by_the_model


def test_one_bind_list_serves_several_engines_if_not_strict(pool: EnginePool, llm: Any) -> None:
    one, other, words = MockLLM(max_tokens=4), MockLLM(max_tokens=5), MockEmbedding(embed_dim=4)
    bind = [(one, "llm"), (other, "llm"), (words, "embedder")]
    for model in (one, other):
        assert str(accelerate(engine_of(model), pool=pool, bind=bind, strict=False).query("why?"))
    with pytest.raises(RegistrationError, match="not a part of"):
        accelerate(engine_of(one), pool=pool, bind=bind)
