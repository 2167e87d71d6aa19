"""A pass of your own: no warm-ups on one engine, say because its prefix cache is too small to keep them.

    python examples/04_custom_pass.py

prints::

    without the pass: %model.prefilling waits for %model.prefilling.partial#0
    with the pass:    %model.prefilling waits for nothing
    same answer: True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import Graph, GraphEdit, PrimitiveKind
from teola_plugin.passes import DEFAULT_PASSES, PassContext


@dataclass(frozen=True, slots=True)
class NoWarmUps:
    """Removes the partial prefillings of `engine`. Options are fields; the graph that comes in is never changed."""

    engine: str
    name: ClassVar[str] = "no-warm-ups"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        gone = {p.id for p in graph if p.kind is PrimitiveKind.PARTIAL_PREFILLING and p.engine == self.engine}
        edit = GraphEdit(graph)
        for p in graph:
            if p.id in gone:
                edit.remove(p.id)
            elif not gone.isdisjoint(p.after):
                edit.replace(p.with_(after=tuple(name for name in p.after if name not in gone)))
        return edit.freeze()  # the very same graph when nothing was there to remove


def waits(fast: Any, given: dict[str, str]) -> str:
    prefilling = fast.plan(given).graph["model.prefilling"]
    return f"%model.prefilling waits for {', '.join('%' + name for name in prefilling.after) or 'nothing'}"


with EnginePool.local(fake_engines(rtx3090())) as pool:
    llm = ChatTeola(pool=pool, max_tokens=8)
    draft = ChatPromptTemplate.from_template("Answer in a few words: {question}") | llm | StrOutputParser()
    better = ChatPromptTemplate.from_template("Improve the answer. " * 20 + "{question}\n{draft}")
    chain = RunnablePassthrough.assign(draft=draft) | better | llm | StrOutputParser()
    given = {"question": "What do lambs eat?"}
    usual = accelerate(chain)
    other = accelerate(chain, passes=(*DEFAULT_PASSES, NoWarmUps("llm")))
    print("without the pass:", waits(usual, given))
    print("with the pass:   ", waits(other, given))
    print("same answer:", usual.invoke(given) == other.invoke(given) == chain.invoke(given))
