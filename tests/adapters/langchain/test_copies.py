"""Tests that accelerated objects can be copied and pickled if the original can."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from operator import itemgetter
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from support.own_leaves import Chat, Ledger

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import fake_engines
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]
GIVEN = {"question": "why"}
COPIES = [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
COPY_IDS = ["copy", "deepcopy", "pickle"]


class Counts(Ledger):
    """A ledger that can be pickled; its copies start empty."""

    def __reduce__(self) -> Any:
        return Counts, ()


def one(ledger: Ledger) -> Chain:
    return ChatPromptTemplate.from_template("{question}") | Chat(ledger=ledger) | StrOutputParser()


def many(ledger: Ledger) -> Chain:
    """Return a chain whose second model is prefetched. LangChain cannot pickle an assign."""
    return RunnablePassthrough.assign(a=one(ledger)).assign(b=one(ledger))


@pytest.mark.parametrize("copied", COPIES, ids=COPY_IDS)
def test_copy_keeps_options_and_results(copied: Any) -> None:
    chain = one(Counts())
    fast = accelerate(chain, speculate="off", app="mine")
    made = copied(fast)
    assert type(made) is type(fast)
    assert (made._speculate, made._app) == ("off", "mine")
    assert made.invoke(GIVEN) == copied(chain).invoke(GIVEN)


@pytest.mark.parametrize("copied", COPIES[:2], ids=COPY_IDS[:2])
def test_copy_keeps_its_prefetch_plan(copied: Any) -> None:
    chain = many(Counts())
    made = copied(accelerate(chain))
    assert made._prefetch_plan is not None and made.invoke(GIVEN) == chain.invoke(GIVEN)


def test_unpicklable_original_makes_pickling_raise_the_same_error() -> None:
    chain = many(Counts())
    with pytest.raises((pickle.PicklingError, AttributeError)) as plain:
        pickle.dumps(chain)
    with pytest.raises(plain.type, match="RunnableParallel"):
        pickle.dumps(accelerate(chain))


def test_deep_copy_has_its_own_objects_and_shares_the_pool() -> None:
    with EnginePool.local(fake_engines()) as pool:
        ledger = Counts()
        chain = many(ledger) | itemgetter("b") | RunnableLambda(str.upper) | ChatTeola(pool=pool)
        fast = accelerate(chain)
        made = copy.deepcopy(fast)
        assert made.invoke(GIVEN).content == fast.invoke(GIVEN).content
        assert made._pool is pool and made.original is not fast.original
        assert ledger.calls == Counter({"model: why": 2})


def test_deep_copy_binds_its_own_models_to_the_engine() -> None:
    with EnginePool.local(fake_engines()) as pool:
        embeddings = DeterministicFakeEmbedding(size=8)
        model = Chat(ledger=Counts())
        chain = ChatPromptTemplate.from_template("{question}") | model
        made = copy.deepcopy(accelerate(chain, pool=pool, bind=[(model, "llm")]))
        assert made.original.last is not model and made.invoke(GIVEN).content
        assert not model.ledger.calls and not made.original.last.ledger.calls
        search = RunnablePassthrough() | InMemoryVectorStore(embeddings).as_retriever()
        assert copy.deepcopy(accelerate(search, pool=pool, bind=[(embeddings, "embedder")])).invoke("x") == []


def test_pickling_a_pool_or_a_chain_with_a_pool_raises() -> None:
    with EnginePool.local(fake_engines()) as pool:
        for obj in (accelerate(one(Counts()), pool=pool), accelerate(ChatTeola(pool=pool)), pool):
            with pytest.raises(RegistrationError, match="cannot be pickled: its engines live in this process"):
                pickle.dumps(obj)


def test_copy_keeps_the_shadow_share() -> None:
    made = copy.deepcopy(accelerate(one(Counts()), shadow=1.0))
    made.invoke(GIVEN)
    assert made._shadow is not None and made._shadow.share == 1.0
