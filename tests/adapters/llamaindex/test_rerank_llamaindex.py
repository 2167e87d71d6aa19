"""Tests of `TeolaRerank`: LlamaIndex's own selection and events, with the engine's scores."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from differential.llamaindex.recording import Recorder
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from teola_plugin.adapters.llamaindex import TeolaRerank
from teola_plugin.engines.fake import FakeReranker
from teola_plugin.errors import RegistrationError
from teola_plugin.requests.payloads import ScorePair

TEXTS = ["green tea", "the cat sleeps", "the dog barks", "the cat sleeps", "tea for the cat"]
QUERY = QueryBundle("the cat drinks tea")


def nodes() -> list[NodeWithScore]:
    made = [TextNode(id_=str(i), text=text, metadata={"i": i}) for i, text in enumerate(TEXTS)]
    return [NodeWithScore(node=node, score=0.5 - i / 10) for i, node in enumerate(made)]


class _Model:
    """In place of the cross encoder of LlamaIndex's own reranker: the fake engine's scores."""

    def predict(self, pairs: list[tuple[str, str]]) -> list[float]:
        engine = FakeReranker()

        class Asked:
            def __init__(self, pair: tuple[str, str]) -> None:
                self.payload = ScorePair(*pair)

        return [engine._value(Asked(pair)) for pair in pairs]  # type: ignore[arg-type]


def own(**options: Any) -> SentenceTransformerRerank:
    values = {"model": "reranker", "top_n": 2, "keep_retrieval_score": False, "device": "cpu", **options}
    made = SentenceTransformerRerank.model_construct(callback_manager=CallbackManager([]), **values)
    made._model = _Model()
    return made


@pytest.mark.parametrize("options", [{}, {"top_n": 9}, {"top_n": 0}, {"keep_retrieval_score": True}])
@pytest.mark.parametrize("sync", [True, False])
def test_teola_rerank_gives_the_nodes_and_events_of_llamaindex(pool, options, sync):
    def run(step: Any) -> tuple[Any, Any, Any]:
        recorder, given = Recorder(), nodes()
        step.callback_manager = CallbackManager([recorder])
        if sync:
            found = step.postprocess_nodes(given, query_bundle=QUERY)
        else:
            found = asyncio.run(step.apostprocess_nodes(given, query_str=QUERY.query_str))
        return found, given, recorder.callbacks

    assert run(TeolaRerank(pool=pool, **options)) == run(own(**options))


def test_rerank_payloads_and_selection_match_the_call(pool, payloads):
    step = TeolaRerank(pool=pool, top_n=3)
    found = step.postprocess_nodes(nodes(), query_bundle=QUERY)
    assert payloads == step.payloads(QUERY, nodes()) == step.payloads(QUERY.query_str, nodes())
    assert payloads[0].text == nodes()[0].node.get_content(MetadataMode.EMBED)
    scores = _Model().predict([(pair.query, pair.text) for pair in payloads])
    assert step.select(nodes(), scores) == found
    assert [type(node.score) for node in found] == [float] * 3


def test_rerank_without_nodes_sends_nothing_and_without_query_raises(pool, payloads):
    step = TeolaRerank(pool=pool)
    assert step.postprocess_nodes([], query_bundle=QUERY) == [] and payloads == []
    with pytest.raises(ValueError, match="Missing query bundle"):
        step.postprocess_nodes(nodes())
    with pytest.raises(RegistrationError, match="engine"):
        TeolaRerank(pool=pool, engine="rerank")
