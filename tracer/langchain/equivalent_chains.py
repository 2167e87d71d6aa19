"""Chains of langchain_classic, older than LCEL, as LCEL: an object with a `_call` of its own, and known prompts."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough

from teola_plugin.shims.langchain import stuffing
from teola_plugin.tracer.langchain.classes import changed
from teola_plugin.tracer.langchain.equivalent_parts import AsDict, Computed, SequentialEach
from teola_plugin.tracer.langchain.prompts import understand

Node = Runnable[Any, Any]
_CHAINS = "langchain_classic.chains"


def _is_exactly(node: Any, name: str) -> bool:
    """Whether it is that class of the framework, unchanged, without a memory, which is asked and told on the way."""
    kind = type(node)
    return (
        f"{kind.__module__}.{kind.__qualname__}" == f"{_CHAINS}.{name}" and not changed(node, kind) and not node.memory
    )


def _reads(*names: str, **steps: Node) -> Node:
    """A dictionary of these keys, and nothing else: these chains pick what their prompts name."""
    return RunnableParallel({**{name: RunnableLambda(itemgetter(name)) for name in names}, **steps})


def _answer(chain: Any, **made: Node) -> Node | None:
    """What an `LLMChain` says, for a dictionary; `made` are variables that are made on the way."""
    if not _is_exactly(chain, "llm.LLMChain") or chain.llm_kwargs or not chain.prompt.input_variables:
        return None
    names = [name for name in chain.prompt.input_variables if name not in made]
    said: Node = _reads(*names, **made) | chain.prompt | chain.llm | chain.output_parser
    return said


def llm_chain(node: Any) -> Node | None:
    said = _answer(node) if node.return_final_only else None
    return None if said is None else _input(node) | RunnablePassthrough.assign(**{node.output_key: said})


def _input(node: Any) -> Node:
    return AsDict(node.input_keys[0] if len(node.input_keys) == 1 else None)


def _stuffed(node: Any) -> Node | None:
    """What a `StuffDocumentsChain` says of the documents under its input key."""
    if not _is_exactly(node, "combine_documents.stuff.StuffDocumentsChain"):
        return None
    joined = _joined(node.document_prompt, node.document_separator)
    return _answer(node.llm_chain, **{node.document_variable_name: RunnableLambda(itemgetter(node.input_key)) | joined})


def stuff(node: Any) -> Node | None:
    said = _stuffed(node)
    return None if said is None else _input(node) | RunnablePassthrough.assign(**{node.output_key: said})


def _joined(prompt: BasePromptTemplate[str], separator: str) -> Node:
    understand(prompt)  # or it is not known to be pure
    return Computed(lambda documents: separator.join(format_document(one, prompt) for one in documents))


def retrieval_qa(node: Any) -> Node | None:
    """Retrieve, stuff, answer."""
    stuffing = node.combine_documents_chain
    said = _stuffed(stuffing)
    if said is None or not _is_exactly(node, "retrieval_qa.base.RetrievalQA"):
        return None
    asked = RunnableLambda(itemgetter(node.input_key))
    found: Node = asked | node.retriever
    made: dict[str, Any] = {}
    if node.return_source_documents:
        made["source_documents"], found = found, RunnableLambda(itemgetter("source_documents"))
    answer = _reads(question=asked, **{stuffing.input_key: found}) | said
    whole = _input(node) | RunnablePassthrough.assign(**made) if made else _input(node)
    return whole | RunnablePassthrough.assign(**{node.output_key: answer})


def mapped(node: Any) -> Node | None:
    """The first half of a `MapReduceDocumentsChain`; how it reduces depends on counted tokens."""
    said = _answer(node.llm_chain)
    if said is None or not _is_exactly(node, "combine_documents.map_reduce.MapReduceDocumentsChain"):
        return None
    others = [name for name in node.llm_chain.prompt.input_variables if name != node.document_variable_name]

    def inputs(given: dict[str, Any]) -> list[dict[str, Any]]:
        shared = {name: given[name] for name in others}
        return [{node.document_variable_name: one.page_content, **shared} for one in given[node.input_key]]

    read = _reads(node.input_key, *others)
    return _input(node) | read | Computed(inputs) | SequentialEach(bound=said)


def stuffing_function(node: Any) -> Node | None:
    """`format_docs`, the function inside `create_stuff_documents_chain`."""
    found = None if "afunc" in vars(node) else stuffing(vars(node).get("func"))
    if found is None:
        return None
    documents: Node = RunnableLambda(itemgetter(found.variable))
    return documents | _joined(found.prompt, found.separator)
