"""`bind=` of LlamaIndex objects: wherever an engine holds them, or not at all; one list for several engines."""

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


def test_never_in_part(pool: EnginePool) -> None:
    llm = MockLLM(max_tokens=4)

    def shortened(**given: Any) -> str:
        return llm.complete(str(given)).text

    template = PromptTemplate("{context_str} {query_str}", function_mappings={"context_str": shortened})
    with pytest.raises(RegistrationError, match=r"also held by the function .*shortened"):
        accelerate(engine_of(llm, template), pool=pool, bind=[(llm, "llm")])


def test_one_list_serves_several_engines(pool: EnginePool, llm: Any) -> None:
    one, other, words = MockLLM(max_tokens=4), MockLLM(max_tokens=5), MockEmbedding(embed_dim=4)
    bind = [(one, "llm"), (other, "llm"), (words, "embedder")]
    for model in (one, other):
        assert str(accelerate(engine_of(model), pool=pool, bind=bind, strict=False).query("why?"))
    with pytest.raises(RegistrationError, match="not a part of"):
        accelerate(engine_of(one), pool=pool, bind=bind)
