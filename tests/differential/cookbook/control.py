"""Control flow as in the cookbooks: routing, loops, fallbacks, tools, agents, graphs, conversations."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Iterator
from operator import itemgetter
from typing import Annotated, Any, TypedDict

from differential.cookbook.bench import TEXTS, Bench
from differential.cookbook.retrieval import ASKED, QUESTION, ask
from langchain.agents import create_agent
from langchain_classic.output_parsers import OutputFixingParser
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.messages import AIMessage, HumanMessage, trim_messages
from langchain_core.output_parsers import PydanticOutputParser, PydanticToolsParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnablePassthrough,
    chain,
)
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel, Field

from benchmarks.langchain.cookbook import joined

Chain = Runnable[Any, Any]


def answer_to(b: Bench, text: str) -> Chain:
    return ask(text) | b.llm | StrOutputParser()


# ------------------------------------------------------------ decomposition and correction in functions


def decomposition_in_a_function(b: Bench) -> Chain:
    """Return a chain whose sub-questions are answered one by one in user code."""
    split = ask("Sub-questions, one per line, of: {question}") | b.kit.chat(9) | StrOutputParser()
    sub_rag = {"context": b.retriever | joined, "question": RunnablePassthrough()} | ask("{context} {question}") | b.llm

    @chain
    def individually(given: dict[str, Any]) -> Any:
        questions = split.invoke(given).split("\n")
        answers = [sub_rag.invoke(q).content for q in questions]
        context = "\n".join(f"{q}: {a}" for q, a in zip(questions, answers, strict=True))
        return {"context": context, **given}

    return individually | answer_to(b, "From {context} answer {question}")


def decomposition_recursively(b: Bench) -> Chain:
    """Return a chain in which each answer is part of the next prompt."""
    split = ask("Sub-questions, one per line, of: {question}") | b.kit.chat(9) | (lambda m: m.content.split("\n"))
    one = {"context": itemgetter("q") | b.retriever | joined, "q": itemgetter("q"), "so_far": itemgetter("so_far")}
    answer = one | answer_to(b, "Q: {q} so far: {so_far} context: {context}")

    async def afold(questions: list[str]) -> str:
        so_far = ""
        for q in questions:
            so_far += "\n---\n" + await answer.ainvoke({"q": q, "so_far": so_far})
        return so_far

    def fold(questions: list[str]) -> str:
        so_far = ""
        for q in questions:
            so_far += "\n---\n" + answer.invoke({"q": q, "so_far": so_far})
        return so_far

    return split | RunnableLambda(fold, afunc=afold)


def corrective_by_a_function(b: Bench) -> Chain:
    """Return a chain with a lambda that returns the next chain, depending on the grader's verdict."""
    grade = ask("Is it relevant, 'yes' or 'no'? {question} {context}") | b.kit.chat(1) | StrOutputParser()
    good = answer_to(b, "{context} {question}")
    again = RunnablePassthrough.assign(context=itemgetter("question") | b.kit.keywords | joined) | good
    return (
        RunnablePassthrough.assign(context=itemgetter("question") | b.retriever | joined)
        | RunnablePassthrough.assign(grade=grade)
        | RunnableLambda(lambda x: good if x["grade"] == "yes" else again)
    )


def branch_with_a_model(b: Bench) -> Chain:
    """Return a branch whose condition calls a model. A later condition must not run."""
    short = answer_to(b, "Short? 'yes' or 'no': {question}") | (lambda text: text == "yes")
    never = answer_to(b, "Never asked? 'yes' or 'no': {question}") | (lambda text: bool(text))
    return RunnableBranch(
        (short, answer_to(b, "Briefly: {question}")), (never, answer_to(b, "At length: {question}")), b.llm
    )


# ------------------------------------------------------------ routing


def routed_by_a_function(b: Bench) -> Chain:
    topic = ask("About imports, 'yes' or 'no'? {question}") | b.kit.chat(1) | StrOutputParser()
    chains = {"yes": answer_to(b, "As an importer: {question}"), "no": answer_to(b, "As anybody: {question}")}
    return {"topic": topic, "question": itemgetter("question")} | RunnableLambda(lambda x: chains[x["topic"]])


def router(b: Bench) -> Chain:
    topic = ask("About imports, 'yes' or 'no'? {question}") | b.kit.chat(1) | StrOutputParser()
    chains = {"yes": answer_to(b, "As an importer: {question}"), "no": answer_to(b, "As anybody: {question}")}
    return {"key": topic, "input": RunnablePassthrough()} | RouterRunnable(runnables=chains)


def routed_by_embeddings(b: Bench) -> Chain:
    """Return a chain that takes the prompt which is nearest to the question."""
    prompts = ["You know imports well. {query}", "You know yield well. {query}"]
    known = b.embeddings.embed_documents(prompts)

    def route(given: dict[str, Any]) -> Any:
        vector = b.embeddings.embed_query(given["query"])
        near = [sum(x * y for x, y in zip(vector, one, strict=True)) for one in known]
        return PromptTemplate.from_template(prompts[near.index(max(near))])

    return {"query": RunnablePassthrough()} | RunnableLambda(route) | b.llm | StrOutputParser()


# ------------------------------------------------------------ fallbacks, retries, configuration


def fallbacks(b: Bench) -> Chain:
    def refuse(_: Any) -> Any:
        raise ConnectionError("the better model is down")

    better = RunnableLambda(refuse) | b.llm
    return (ask("{question}") | better.with_fallbacks([b.llm]) | StrOutputParser()).with_config(tags=["fallible"])


def fallback_that_is_told(b: Bench) -> Chain:
    broken = ask("{missing}") | b.llm
    return broken.with_fallbacks([answer_to(b, "{question} {error}")], exception_key="error")


def retries(b: Bench) -> Chain:
    prompt = ask("Try {question}")
    return (
        prompt | b.llm.with_retry(stop_after_attempt=2, wait_exponential_jitter=False) | StrOutputParser()
    ).with_retry(retry_if_exception_type=(KeyError,), stop_after_attempt=2, wait_exponential_jitter=False)


def configurable_model(b: Bench) -> Chain:
    prompt = PromptTemplate.from_template("Tell of {question}").configurable_alternatives(
        ConfigurableField(id="style"), default_key="plain", poem=PromptTemplate.from_template("A poem of {question}")
    )
    model = b.llm.configurable_alternatives(ConfigurableField(id="size"), default_key="small", large=b.kit.chat(20))
    return (prompt | model | StrOutputParser()).with_config(configurable={"style": "poem", "size": "large"})


def configurable_search(b: Bench) -> Chain:
    found = b.retriever.configurable_fields(search_kwargs=ConfigurableField(id="search"))
    context = found.with_config(configurable={"search": {"k": 1}})
    return {"context": context | joined, "question": RunnablePassthrough()} | answer_to(b, "{context} {question}")


# ------------------------------------------------------------ structured output, tools


class Fact(BaseModel):
    """A fact."""

    name: str = Field(description="its name")
    weight: int


class Joke(BaseModel):
    """A joke."""

    setup: str


def structured(b: Bench) -> Chain:
    model: Any = b.kit.chat(60) if b.kit.pool is not None else b.tooled
    return ask("A fact of {question}") | model.with_structured_output(Fact)


def structured_with_raw(b: Bench) -> Chain:
    return ask("A fact of {question}") | b.tooled.with_structured_output(Fact, include_raw=True)


def graded_by_structure(b: Bench) -> Chain:
    """Return a chain that grades documents one by one with structured output, and keeps the good ones."""
    grader = ask("Grade {document} for {question}") | b.tooled.with_structured_output(Fact)
    return (
        RunnablePassthrough.assign(documents=itemgetter("question") | b.retriever)
        | RunnablePassthrough.assign(
            grades=RunnableLambda(
                lambda x: [{"document": d.page_content, "question": x["question"]} for d in x["documents"]]
            )
            | grader.map()
        )
        | (
            lambda x: {
                "context": [d.page_content for d, g in zip(x["documents"], x["grades"], strict=True) if g.weight > 4],
                "question": x["question"],
            }
        )
        | answer_to(b, "{context} {question}")
    )


def tools_of(b: Bench) -> list[Any]:
    @tool
    def look_up(query: str) -> str:
        """Looks something up."""
        b.ledger.used(f"look_up({query})")
        return joined(b.retriever.invoke(query))

    @tool
    def add(a: int, b_: int) -> int:
        """Adds two numbers."""
        b.ledger.used(f"add({a}, {b_})")
        return a + b_

    return [look_up, add]


def tool_calling(b: Bench) -> Chain:
    """Return a chain whose model calls a tool. The tool runs, and the model gets its result."""
    tools = {t.name: t for t in tools_of(b)}
    prompt = ChatPromptTemplate.from_messages([("human", "{question}"), MessagesPlaceholder("called", optional=True)])
    calls = prompt | b.tooled.bind_tools(list(tools.values()))

    @chain
    def called(given: dict[str, Any]) -> Any:
        message = calls.invoke(given)
        return {**given, "called": [message, *(tools[c["name"]].invoke(c) for c in message.tool_calls)]}

    return called | called | calls | StrOutputParser()


def parsed_tools(b: Bench) -> Chain:
    return (
        ask("{question}")
        | b.tooled.bind_tools([Fact, Joke], tool_choice="any")
        | PydanticToolsParser(tools=[Fact, Joke])
    )


class Answer(BaseModel):
    answer: str


def output_fixing(b: Bench) -> Chain:
    """Return a chain whose model writes invalid JSON. Another call repairs it."""
    retry_prompt = PromptTemplate.from_template(
        "{instructions} {completion} {error} Write it as JSON with the key answer."
    )
    parser = PydanticOutputParser(pydantic_object=Answer)
    fixing = OutputFixingParser.from_llm(parser=parser, llm=b.llm, prompt=retry_prompt, max_retries=2)
    return ask("Say something of {question}") | b.llm | fixing


def few_shot_by_similarity(b: Bench) -> Chain:
    """Return a chain whose prompt searches for its examples while it is formatted."""
    examples = [{"input": word, "output": text} for word, text in zip(("import", "yield", "with"), TEXTS, strict=False)]
    store = b.new_store("examples")
    store.add_texts([e["input"] for e in examples], metadatas=[dict(e) for e in examples])
    prompt = FewShotPromptTemplate(
        example_selector=SemanticSimilarityExampleSelector(vectorstore=store, k=2, input_keys=["question"]),
        example_prompt=PromptTemplate.from_template("{input} -> {output}"),
        suffix="{question} ->",
        input_variables=["question"],
    )
    return prompt | b.llm | StrOutputParser()


# ------------------------------------------------------------ generators, batches, functions


def streaming_generator(b: Bench) -> Chain:
    """Return a chain that splits the text into items while it streams."""

    def items(pieces: Iterator[str]) -> Iterator[list[str]]:
        rest = ""
        for piece in pieces:
            *done, rest = (rest + piece).split(" ")
            yield from ([one] for one in done)
        yield [rest]

    async def aitems(pieces: AsyncIterator[str]) -> AsyncIterator[list[str]]:
        rest = ""
        async for piece in pieces:
            *done, rest = (rest + piece).split(" ")
            for one in done:
                yield [one]
        yield [rest]

    return answer_to(b, "List {question}") | RunnableGenerator(items, aitems)


def generator_function(b: Bench) -> Chain:
    """Return a chain with a generator as lambda, whose pieces add up."""

    def upper(text: str) -> Iterator[str]:
        for word in text.split():
            yield word.upper() + " "

    return answer_to(b, "Words of {question}") | RunnableLambda(upper)


def batch_in_a_function(b: Bench) -> Chain:
    each = answer_to(b, "Translate {text}")

    async def aall(given: dict[str, Any]) -> list[str]:
        return await each.abatch([{"text": word} for word in given["question"].split()[:4]])

    def all_(given: dict[str, Any]) -> list[str]:
        return each.batch([{"text": word} for word in given["question"].split()[:4]], config={"max_concurrency": 1})

    return RunnableLambda(all_, afunc=aall) | ", ".join


def mapped_twice(b: Bench) -> Chain:
    """Return a chain that translates each word, and searches with each translation."""
    words = RunnableLambda(lambda x: [{"text": w} for w in x["question"].split()[:3]])
    return (
        words | answer_to(b, "Translate {text}").map() | b.retriever.map() | (lambda found: [len(one) for one in found])
    )


def self_critique(b: Bench) -> Chain:
    """Return a chain of a draft, a critique and a better draft: several assigns, and a `pick`."""
    return (
        RunnablePassthrough.assign(draft=answer_to(b, "Draft of {question}"))
        .assign(critique=answer_to(b, "Critique of {draft}"), tone=answer_to(b, "Tone for {question}"))
        .assign(final=answer_to(b, "{draft} after {critique} in {tone}"))
        .pick(["final", "critique"])
    )


# ------------------------------------------------------------ conversations


def remembered(b: Bench) -> Chain:
    kept: dict[str, InMemoryChatMessageHistory] = {}

    def session(session_id: str) -> InMemoryChatMessageHistory:
        spoken = [HumanMessage("hello"), AIMessage("good day")]
        return kept.setdefault(session_id, InMemoryChatMessageHistory(messages=spoken))

    prompt = ChatPromptTemplate.from_messages(
        [("system", "Be kind."), MessagesPlaceholder("past"), ("human", "{input}")]
    )
    talk = RunnableWithMessageHistory(
        prompt | b.llm, session, input_messages_key="input", history_messages_key="past"
    ).with_config(configurable={"session_id": "me"})
    return RunnableLambda(lambda x: {"input": x["question"]}) | talk


def trimmed(b: Bench) -> Chain:
    trim = trim_messages(max_tokens=2, token_counter=len, strategy="last", start_on="human")
    return trim | b.llm | StrOutputParser()


# ------------------------------------------------------------ graphs and agents


def agent(b: Bench) -> Chain:
    return create_agent(b.tooled, tools_of(b), system_prompt="Use your tools.")


def agent_in_a_chain(b: Bench) -> Chain:
    asks = RunnableLambda(lambda x: {"messages": [HumanMessage(x["question"])]})
    return asks | agent(b) | (lambda state: state["messages"][-1]) | StrOutputParser()


class Search(TypedDict, total=False):
    question: str
    context: str
    answer: str
    tries: Annotated[int, operator.add]


def self_rag_graph(b: Bench) -> Chain:
    """Build a graph that retrieves, answers and grades. It rewrites the question up to two times."""
    answer, rewrite = answer_to(b, "{context} {question}"), answer_to(b, "Rewrite {question}")
    grade = ask("Does it answer, 'yes' or 'no'? {answer} {question}") | b.kit.chat(1) | StrOutputParser()

    def retrieve(state: Search) -> Search:
        return {"context": joined(b.retriever.invoke(state["question"])), "tries": 1}

    def generate(state: Search) -> Search:
        return {"answer": answer.invoke(dict(state))}

    def transform(state: Search) -> Search:
        return {"question": rewrite.invoke(dict(state))}

    def decide(state: Search) -> str:
        return END if state["tries"] > 1 or grade.invoke(dict(state)) == "yes" else "transform"

    graph = StateGraph(Search)
    for node in (retrieve, generate, transform):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "generate")
    graph.add_conditional_edges("generate", decide)
    graph.add_edge("transform", "retrieve")
    return graph.compile()


class Topics(TypedDict, total=False):
    question: str
    topics: list[str]
    notes: Annotated[list[str], operator.add]


def sending_graph(b: Bench) -> Chain:
    """Build a graph that writes a note for each topic by `Send`."""
    split = ask("Topics, one per line: {question}") | b.kit.chat(6) | StrOutputParser()
    note = answer_to(b, "Note on {topic}")

    graph = StateGraph(Topics)
    graph.add_node("split", lambda state: {"topics": split.invoke(dict(state)).split("\n")})
    graph.add_node("note", lambda state: {"notes": [note.invoke(state)]})
    graph.add_edge(START, "split")
    graph.add_conditional_edges("split", lambda state: [Send("note", {"topic": t}) for t in state["topics"]], ["note"])
    return graph.compile()


CHAINS: dict[str, tuple[Any, Any]] = {
    "decomposition_in_a_function": (decomposition_in_a_function, QUESTION),
    "decomposition_recursively": (decomposition_recursively, QUESTION),
    "corrective_by_a_function": (corrective_by_a_function, QUESTION),
    "branch_with_a_model": (branch_with_a_model, QUESTION),
    "routed_by_a_function": (routed_by_a_function, QUESTION),
    "router": (router, QUESTION),
    "routed_by_embeddings": (routed_by_embeddings, ASKED),
    "fallbacks": (fallbacks, QUESTION),
    "fallback_that_is_told": (fallback_that_is_told, QUESTION),
    "retries": (retries, QUESTION),
    "configurable_model": (configurable_model, QUESTION),
    "configurable_search": (configurable_search, ASKED),
    "structured": (structured, QUESTION),
    "structured_with_raw": (structured_with_raw, QUESTION),
    "graded_by_structure": (graded_by_structure, QUESTION),
    "tool_calling": (tool_calling, QUESTION),
    "parsed_tools": (parsed_tools, QUESTION),
    "output_fixing": (output_fixing, QUESTION),
    "few_shot_by_similarity": (few_shot_by_similarity, QUESTION),
    "streaming_generator": (streaming_generator, QUESTION),
    "generator_function": (generator_function, QUESTION),
    "batch_in_a_function": (batch_in_a_function, QUESTION),
    "mapped_twice": (mapped_twice, QUESTION),
    "self_critique": (self_critique, QUESTION),
    "remembered": (remembered, QUESTION),
    "trimmed": (trimmed, [HumanMessage("one"), AIMessage("two"), HumanMessage("three")]),
    "agent": (agent, {"messages": [HumanMessage(ASKED)]}),
    "agent_in_a_chain": (agent_in_a_chain, QUESTION),
    "self_rag_graph": (self_rag_graph, QUESTION),
    "sending_graph": (sending_graph, QUESTION),
}
