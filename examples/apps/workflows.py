"""The five applications as workflows: components joined by `>>`, for those who have no chain.

Run one from the root of the checkout::

    python -m examples.apps.workflows advanced_rag                    real engines of this machine
    python -m examples.apps.workflows advanced_rag --fakes            latencies of an RTX 3090, no model
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_text_splitters import RecursiveCharacterTextSplitter

from examples.apps import advanced_rag, agent, naive_rag, prompts, search_engine
from examples.apps.contextual_retrieval import LINE_TOKENS, WHOLE
from examples.apps.engines import fake_pool, real_pool
from examples.apps.runner import parser_of
from examples.apps.uploads import CHARACTERS, read
from teola_plugin.observe.text import timeline_text
from teola_plugin.workflow import (
    PER_QUERY,
    Branch,
    Chunking,
    Condition,
    Function,
    Generation,
    Indexing,
    Map,
    Prompt,
    QueryExpansion,
    Reranking,
    Result,
    Searching,
    Synthesis,
    Tool,
    WebSearch,
    Workflow,
)


def prompt(template: ChatPromptTemplate, **names: str) -> Prompt:
    """The same words; `names` are other ones for its variables."""
    system, text = (message.prompt.template for message in template.messages)  # type: ignore[union-attr]
    for old, new in names.items():
        text = text.replace(f"{{{old}}}", f"{{{new}}}")
    return Prompt(text, system)


def by_characters(*, chunk_size: int, chunk_overlap: int) -> RecursiveCharacterTextSplitter:
    """Sizes in tokens; a token is taken as four characters."""
    return RecursiveCharacterTextSplitter(chunk_size=chunk_size * CHARACTERS, chunk_overlap=chunk_overlap * CHARACTERS)


ANSWER = prompt(prompts.ANSWER, passage="context")
REFINE = prompt(prompts.REFINE, passage="context", previous="answer")
COMBINE = Prompt("Question: {question}\n\nPartial answers:\n{answers}\n\nAnswer:", prompt(prompts.COMBINE).system)
ANSWERING: dict[str, Any] = {"max_tokens": naive_rag.ANSWER_TOKENS}


def naive(proxy: str) -> Workflow:
    """Chunks of 256 tokens, the 3 nearest, a tree of answers."""
    return Workflow(
        "naive_rag",
        Indexing("index", documents="document", splitter=by_characters, collection=PER_QUERY)
        >> Searching("found", k=3, collection=PER_QUERY)
        >> Synthesis("answer", context="found", mode="tree", prompt=ANSWER, combine_prompt=COMBINE, **ANSWERING),
    )


def advanced(proxy: str) -> Workflow:
    """3 more questions, 16 passages each, reranked to 3, refined."""
    return Workflow(
        "advanced_rag",
        Indexing("index", documents="document", splitter=by_characters, collection=PER_QUERY)
        >> QueryExpansion("queries", n=advanced_rag.EXPANSIONS, prompt=prompt(prompts.EXPAND), max_tokens=96)
        >> Searching("found", query="queries", k=advanced_rag.SEARCHED, collection=PER_QUERY)
        >> Reranking("best", passages="found", k=advanced_rag.TOP)
        >> Synthesis("answer", context="best", mode="refine", prompt=ANSWER, refine_prompt=REFINE, **ANSWERING),
    )


def contextual(proxy: str) -> Workflow:
    """A line about each chunk, then index, search, answer."""
    line = Generation("line", prompt(prompts.SITUATE, document="seen"), reads={"chunk": "item"}, engine=proxy)
    return Workflow(
        "contextual_retrieval",
        Chunking("chunks", documents="document", splitter=by_characters)
        >> Function("seen", lambda document: document[:WHOLE], pure=True)
        >> Map("lines", over="chunks", flow=line.configured({"line": {"max_tokens": LINE_TOKENS}}))
        >> Function("situated", situated, pure=True)
        >> Indexing("index", documents="situated", chunk_size=10**6, collection=PER_QUERY)
        >> Searching("found", k=naive_rag.TOP, collection=PER_QUERY)
        >> Synthesis("answer", context="found", mode="compact", prompt=ANSWER, **ANSWERING),
    )


def situated(lines: list[str], chunks: Any) -> list[str]:
    """The chunks as they are indexed: behind the line about them."""
    return [f"{line.strip()}\n\n{chunk.text}" for line, chunk in zip(lines, chunks, strict=True)]


def search(proxy: str) -> Workflow:
    """A small model guesses and judges; the search runs where it says no."""
    asked = "A guess at the answer: {guess}\n\nMessage: {question}"
    schema = json.dumps(search_engine.Verdict.model_json_schema())
    return Workflow(
        "search_engine",
        Generation("guess", Prompt("{question}", "You are a helpful assistant."), engine=proxy, max_tokens=48)
        >> Generation("verdict", Prompt(asked, prompts.JUDGE), engine=proxy, max_tokens=48, json_schema=schema)
        >> Condition("needed", value="verdict", test=lambda verdict: json.loads(verdict)["alone"] != "yes")
        >> Branch("found", condition="needed", then=WebSearch("web", k=search_engine.RESULTS))
        >> Function("known", known, pure=True)
        >> Generation("answer", ANSWER, reads={"context": "known"}, **ANSWERING),
        sources="found",
    )


def known(guess: str, found: Any) -> str:
    """What the core model answers from."""
    return "\n\n".join(hit.text for hit in found or ()) or guess


def agent_flow(proxy: str) -> Workflow:
    """The model chooses a tool, it is called in its place, the model answers with what it says."""
    functions = [convert_to_openai_tool(tool)["function"] for tool in agent.TOOLS]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "arguments": one["parameters"]},
            "required": ["name", "arguments"],
        }
        for one in functions
    ]
    schema, tools = json.dumps({"anyOf": calls}), json.dumps([one["name"] for one in functions])
    call = Prompt("Tools: {tools}\n\nRequest: {question}", prompts.CALL).with_(tools=tools)
    return Workflow(
        "agent",
        Generation("choice", call, json_schema=schema, **ANSWERING)
        >> Tool("told", called, reads={"call": "choice"})
        >> Generation("answer", ANSWER, reads={"context": "told"}, **ANSWERING),
    )


def called(call: str) -> str:
    """What the tool says that the model has chosen."""
    asked = json.loads(call)
    return str({tool.name: tool for tool in agent.TOOLS}[asked["name"]].invoke(asked["arguments"]))


WORKFLOWS: dict[str, Callable[[str], Workflow]] = {
    "naive_rag": naive,
    "advanced_rag": advanced,
    "contextual_retrieval": contextual,
    "search_engine": search,
    "agent": agent_flow,
}
"""(engine of the small model) -> workflow."""
ASKED = {"agent": agent.APP.question}


def inputs(name: str, question: str, document: str | None) -> dict[str, Any]:
    uploads = name.endswith(("rag", "retrieval"))
    return {"question": question, **({"document": read(document)} if uploads else {})}


def run(arguments: list[str]) -> Result:
    """The command line."""
    first = argparse.ArgumentParser(prog="python -m examples.apps.workflows", add_help=False)
    first.add_argument("workflow", choices=tuple(WORKFLOWS))
    chosen, rest = first.parse_known_args(arguments)
    name = chosen.workflow
    args = parser_of(f"workflows {name}", name, ASKED.get(name, naive_rag.APP.question)).parse_args(rest)
    fakes = args.fakes is not None
    with fake_pool(factor=args.fakes) if fakes else real_pool(args) as pool:
        app = WORKFLOWS[name]("proxy" if fakes or args.proxy else "llm").deploy(pool)
        result = app.run(inputs(name, args.question, args.document))
    print(f"question: {args.question}\nanswer:   {result.answer}")
    for number, source in enumerate(result.sources, start=1):
        print(f"  [{number}] {' '.join(source.text.split())[:100]}")
    print(timeline_text(result.trace) if result.trace is not None else "no trace")
    return result


if __name__ == "__main__":
    run(sys.argv[1:])
