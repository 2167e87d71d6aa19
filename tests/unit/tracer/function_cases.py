"""Functions as people write them for graphs, and the requests that are made before they run."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from function_resources import Resources
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnablePassthrough
from pydantic import BaseModel

logger = logging.getLogger(__name__)
RULES = "You are a careful farmer. Answer with the notes alone, in one line, and say so where they do not tell."
ANSWER = ChatPromptTemplate.from_template(RULES + "\nNotes: {context}\nQuestion: {question}")
GRADE = ChatPromptTemplate.from_messages(
    [("system", "Does the note answer the question? Grade it 'yes' or 'no'."), ("human", "{document}\n\n{question}")]
)
TALK = ChatPromptTemplate.from_messages([("system", RULES), MessagesPlaceholder("history"), ("human", "{question}")])
NOTES = [Document("oats are sown in spring"), Document("ivy climbs"), Document("moss likes shade")]
STATE: dict[str, Any] = {
    "question": " what about oats? ",
    "documents": NOTES,
    "queries": ["oats", "ivy", "moss"],
    "messages": [HumanMessage("hello"), AIMessage("yes?"), HumanMessage("what of moss?")],
    "tries": 1,
    "answer": "oats",
}


class Grade(BaseModel):
    """The grade of a document."""

    grade: str


class Plan(BaseModel):
    """Queries for a search."""

    queries: list[str]


@dataclass(frozen=True)
class Case:
    """A function, how it is called, and the requests that are expected of it."""

    func: Callable[..., Any]
    prefetched: int
    """Requests that engines have before it runs."""
    requests: int
    """Requests that the original function makes."""
    inputs: Mapping[str, Any] = field(default_factory=lambda: STATE)
    arguments: bool = False
    """True if it is called with arguments, as a tool, rather than with a state."""
    model: type | None = None
    """The class of the state, if that is an object."""
    prefilled: int = 0
    """Prompts whose beginning is prefilled."""


def formatted(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def opaque_code(value: Any) -> Any:
    """Return a text that the reader of functions cannot know before the call."""
    OPAQUE_CALLS.append(value)
    return f"{value}, for the {len(OPAQUE_CALLS) and 'n'}th time"


OPAQUE_CALLS: list[Any] = []


def straight_line_cases(resources: Resources) -> dict[str, Case]:
    retriever, chain = resources.retriever, ANSWER | resources.llm | StrOutputParser()

    def generate(state: Any) -> Any:
        print("--- generate ---")
        question, documents = state["question"], state["documents"]
        answer = chain.invoke({"context": documents, "question": question})
        return {"documents": documents, "question": question, "answer": answer}

    def retrieve(state: dict[str, Any]) -> dict[str, Any]:
        """Searches."""
        question = state["question"].strip()
        logger.info("searching for %s", question)
        return {"documents": retriever.invoke(question), "question": question}

    async def searched_answer(state: Any) -> Any:
        documents = await retriever.ainvoke(state.get("question"))
        context = "\n\n".join(d.page_content for d in documents[:3])
        answer = await chain.ainvoke({"context": context, "question": state["question"]})
        return {"answer": answer, "count": len(documents)}

    def helper_formats(state: Any) -> Any:
        documents = retriever.invoke(state["queries"][0])
        return {"answer": chain.invoke({"context": formatted(documents), "question": state["question"]})}

    def reranked(state: Any) -> Any:
        best = resources.reranker.compress_documents(state["documents"], state["question"])
        return {"documents": best}

    def not_asking(state: Any) -> Any:
        return {"tries": state["tries"] + 1}

    def tool(query: str, k: int = 2) -> str:
        """Looks things up."""
        return formatted(retriever.invoke(query))

    return {
        "generate": Case(generate, 1, 1),
        "retrieve": Case(retrieve, 2, 2),
        "searched_answer": Case(searched_answer, 3, 3),
        "helper_formats": Case(helper_formats, 3, 3),
        "reranked": Case(reranked, 3, 3),
        "not_asking": Case(not_asking, 0, 0),
        "tool": Case(tool, 2, 2, {"query": "oats"}, arguments=True),
    }


def prompt_cases(resources: Resources) -> dict[str, Case]:
    llm = resources.llm

    def f_string(state: Any) -> Any:
        reply = llm.invoke(f"{RULES}\n\nQuestion: {state['question'].strip()!s}\nTry: {state['tries']:02d}\nAnswer:")
        return {"messages": [reply]}

    def concatenated(state: Any) -> Any:
        prompt = RULES + "\nQuestion: " + state["question"] + "\n" + "Answer:"
        return {"answer": llm.invoke(prompt).content}

    def format_method(state: Any) -> Any:
        template = "{rules}\nQuestion: {question}\n{}"
        return {"answer": llm.invoke(template.format("Answer:", rules=RULES, question=state["question"])).content}

    def percent(state: Any) -> Any:
        return {"answer": llm.invoke("%s\nQuestion: %s" % (RULES, state["question"])).content}  # noqa: UP031

    def messages(state: Any) -> Any:
        reply = llm.invoke([SystemMessage(content=RULES), HumanMessage(content=f"Of {state['question']}: why?")])
        return {"messages": [reply]}

    def history(state: Any) -> Any:
        return {"messages": [llm.invoke([SystemMessage(RULES)] + state["messages"])]}

    def spread_history(state: Any) -> Any:
        prompt = [("system", RULES), *state["messages"], ("human", f"And {state['answer']}?")]
        return {"messages": [llm.invoke(prompt)]}

    def role_dictionaries(state: Any) -> Any:
        prompt = [{"role": "system", "content": RULES}, {"role": "user", "content": state["question"]}]
        return {"messages": llm.invoke(prompt)}

    def bare_messages(state: Any) -> Any:
        return {"messages": [llm.invoke(state["messages"])]}

    def last_message(state: Any) -> Any:
        question = state["messages"][-1].content
        return {"answer": llm.invoke(f"{RULES} {question}").content}

    def formatted_prompt(state: Any) -> Any:
        prompt = TALK.invoke({"history": state["messages"], "question": state["question"]})
        return {"messages": [llm.invoke(prompt)]}

    def stripped_block(state: Any) -> Any:
        prompt = f"""
        {RULES}
        Question: {state["question"]}
        Answer:
        """.strip()
        return {"answer": llm.invoke(prompt).content}

    def second_of_two(state: Any) -> Any:
        first = llm.invoke(f"Rephrase: {state['question']}")
        second = llm.invoke(f"{RULES}\nQuestion: {first.content}\nAnswer:")
        return {"messages": [first, second]}

    def streamed(state: Any) -> Any:
        text = ""
        for chunk in llm.stream(f"Tell of {state['question']}"):
            text += chunk.content
        return {"answer": text}

    return {
        name: Case(func, 2 if name == "second_of_two" else 1, 2 if name == "second_of_two" else 1)
        for name, func in locals().items()
        if name not in ("resources", "llm")
    }


def partly_known_prompt_cases(resources: Resources) -> dict[str, Case]:
    """Return functions whose lists and texts have a known start and an unknown end."""
    llm, chain = resources.llm, ANSWER | resources.llm | StrOutputParser()

    def found_elsewhere(state: Any) -> Any:
        more = [Document(opaque_code("more"))]
        context = formatted([*state["documents"], *more])
        return {"answer": chain.invoke({"context": context, "question": state["question"]})}

    def lines_then_own(state: Any) -> Any:
        lines = ["Notes:"] + state["queries"] + [opaque_code("more")]
        return {"answer": llm.invoke(f"{RULES}\n" + "\n".join(f"- {line}" for line in lines)).content}

    def all_in_pieces(state: Any) -> Any:
        retrieved = resources.retriever.invoke(state["question"])
        empty = [d for d in state["documents"] if d.page_content == ""]
        context = "\n".join(d.page_content for d in [*empty, *state["documents"], *empty, *retrieved])
        words = ", ".join([*(q for q in state["queries"] if q == ""), "first", *state["queries"], *[], "last"])
        more_words = "; ".join([*(q for q in state["queries"] if q == ""), state["answer"], *state["queries"]])
        answer = chain.invoke({"context": context, "question": f"{words}? {more_words}"})
        return {"answer": answer}

    def joined_by_helper(state: Any) -> Any:
        retrieved = resources.retriever.invoke(state["question"])
        context = formatted([*state["documents"], *retrieved])
        return {"answer": chain.invoke({"context": context, "question": state["question"]})}

    return {
        "found_elsewhere": Case(found_elsewhere, 0, 1, prefilled=1),
        "joined_by_helper": Case(joined_by_helper, 3, 3),
        "lines_then_own": Case(lines_then_own, 0, 1, prefilled=1),
        "all_in_pieces": Case(all_in_pieces, 3, 3),
    }


def local_object_cases(resources: Resources) -> dict[str, Case]:
    llm = resources.llm

    def chain_inside(state: Any) -> Any:
        chain = ChatPromptTemplate.from_template(RULES + " {question}") | llm.bind(stop=["#"]) | StrOutputParser()
        return {"answer": chain.invoke({"question": state["question"]})}

    def structured(state: Any) -> Any:
        planner = llm.with_structured_output(Plan)
        plan = planner.invoke([SystemMessage(RULES), HumanMessage(state["question"])])
        return {"queries": plan.queries}

    def field_into_prompt(state: Any) -> Any:
        grade = (GRADE | llm.with_structured_output(Grade)).invoke(
            {"document": state["documents"][0].page_content, "question": state["question"]}
        )
        return {"answer": llm.invoke(f"It was graded {grade.grade}. Why?").content}

    def imported_inside(state: Any) -> Any:
        from langchain_core.output_parsers import StrOutputParser as Parser
        from langchain_core.prompts import PromptTemplate

        prompt = PromptTemplate(template=RULES + "{question}", input_variables=["question"])
        return {"answer": (prompt | llm | Parser()).invoke({"question": state["question"]})}

    def mapping_chain(state: Any) -> Any:
        chain = {"context": resources.retriever | formatted, "question": RunnablePassthrough()} | ANSWER | llm
        return {"answer": chain.invoke(state["question"]).content}

    def lambdas_inside(state: Any) -> Any:
        context = resources.retriever | (lambda documents: "; ".join(d.page_content for d in documents))
        chain = RunnablePassthrough.assign(context=itemgetter("question") | context) | ANSWER | llm
        return {"answer": chain.invoke({"question": state["question"]}).content}

    def searches_and_vectors(state: Any) -> Any:
        documents = resources.store.similarity_search(state["question"], k=3)
        best = resources.reranker.compress_documents(documents=documents, query=state["question"])
        vector = resources.store.embeddings.embed_query(state["answer"])
        vectors = resources.store.embeddings.embed_documents(state["queries"])
        return {"documents": best, "vectors": [vector, *vectors]}

    def formatted_text(state: Any) -> Any:
        text = ANSWER.format(context=state["documents"][0].page_content, question=state["question"])
        messages = TALK.format_messages(history=state["messages"], question=state["question"])
        return {"answer": llm.invoke(text).content, "messages": [llm.invoke(messages)]}

    def retriever_inside(state: Any) -> Any:
        return {"documents": resources.store.as_retriever(search_kwargs={"k": 3}).invoke(state["question"])}

    return {
        "chain_inside": Case(chain_inside, 1, 1),
        "structured": Case(structured, 1, 1),
        "field_into_prompt": Case(field_into_prompt, 2, 2),
        "imported_inside": Case(imported_inside, 1, 1),
        "mapping_chain": Case(mapping_chain, 3, 3),
        "lambdas_inside": Case(lambdas_inside, 3, 3),
        "searches_and_vectors": Case(searches_and_vectors, 9, 9),
        "formatted_text": Case(formatted_text, 2, 2),
        "retriever_inside": Case(retriever_inside, 2, 2),
    }


def loop_cases(resources: Resources) -> dict[str, Case]:
    llm, retriever = resources.llm, resources.retriever
    grader = GRADE | llm.with_structured_output(Grade)

    def grade_documents(state: Any) -> Any:
        """The corrective RAG of the tutorials."""
        print("---CHECK DOCUMENT RELEVANCE TO QUESTION---")
        question = state["question"]
        documents = state["documents"]
        filtered_docs = []
        web_search = "No"
        for d in documents:
            score = grader.invoke({"question": question, "document": d.page_content})
            grade = score.grade
            if grade == "yes":
                print("---GRADE: DOCUMENT RELEVANT---")
                filtered_docs.append(d)
            else:
                print("---GRADE: DOCUMENT NOT RELEVANT---")
                web_search = "Yes"
                continue
        return {"documents": filtered_docs, "question": question, "web_search": web_search}

    def graded_answer(state: Any) -> Any:
        relevant, irrelevant = [], []
        for d in state["documents"]:
            grade = grader.invoke({"question": state["question"], "document": d.page_content}).grade
            if grade == "yes" or "oats" in d.page_content:
                logger.info("of use")
                relevant.append(d)
                if "spring" in d.page_content:
                    relevant.append(d)
            else:
                irrelevant.append(d.page_content)
                continue
        context = formatted(relevant) + f" ({', '.join(irrelevant)})"
        return {"answer": (ANSWER | llm).invoke({"context": context, "question": state["question"]}).content}

    def short_ones(state: Any) -> Any:
        words = ["first"]
        for q in state["queries"]:
            if len(q) < 4:
                words.append(q)
        return {"answer": llm.invoke(f"Of {' '.join(words)}").content}

    def until_two(state: Any) -> Any:
        relevant: list[Any] = []
        for d in state["documents"]:
            grade = llm.invoke(f"Is it of use? {d.page_content}").content
            if grade and len(relevant) < 2:
                relevant.append(d)
        return {"answer": llm.invoke(f"{RULES} {formatted(relevant)}").content}

    def comprehension(state: Any) -> Any:
        grades = [
            grader.invoke({"question": state["question"], "document": d.page_content}) for d in state["documents"]
        ]
        return {"grades": [one.grade for one in grades]}

    def chosen_items(state: Any) -> Any:
        replies = [llm.invoke(f"Of {q}, in {len(state['queries'])}") for q in state["queries"] if q != "ivy"]
        return {"messages": replies}

    def appended(state: Any) -> Any:
        parts = []
        for i, q in enumerate(state["queries"]):
            reply = llm.invoke(f"{i}. What of {q}?")
            parts.append(reply.content)
        return {"answer": llm.invoke("Sum up:\n" + "\n".join(parts)).content}

    def two_lists(state: Any) -> Any:
        document_lists, replies = [], []
        for q in state["queries"]:
            documents = retriever.invoke(q)
            document_lists.append(documents)
            replies.append(llm.invoke(f"{q}: {formatted(documents)}").content)
        return {"documents": document_lists, "answer": llm.invoke("; ".join(replies)).content}

    def batched(state: Any) -> Any:
        grades = grader.batch([{"question": state["question"], "document": d.page_content} for d in state["documents"]])
        return {"grades": grades}

    async def gathered(state: Any) -> Any:
        replies = await asyncio.gather(*[llm.ainvoke(f"What of {q}?") for q in state["queries"]])
        return {"answer": (await llm.ainvoke("Sum up: " + " ".join(m.content for m in replies))).content}

    async def tasks(state: Any) -> Any:
        one = asyncio.create_task(llm.ainvoke(f"First: {state['question']}"))
        other = llm.ainvoke(f"Second: {state['question']}")
        first, second = await asyncio.gather(one, other)
        return {"answer": first.content + second.content}

    async def helper_each(state: Any) -> Any:
        async def look(query: str) -> str:
            return formatted(await retriever.ainvoke(query))

        return {"found": await asyncio.gather(*(look(q) for q in state["queries"]))}

    def fixed_list(state: Any) -> Any:
        return {"answer": [llm.invoke(f"{how} {state['question']}").content for how in ("Briefly:", "At length:")]}

    def written_queries(state: Any) -> Any:
        plan = llm.with_structured_output(Plan).invoke(f"Write queries for {state['question']}")
        documents = [document for query in plan.queries for document in retriever.invoke(query)]
        return {"documents": documents}

    def carried(state: Any) -> Any:
        answer = ""
        for d in state["documents"]:
            answer = llm.invoke(f"Refine {answer} with {d.page_content}").content
        return {"answer": answer}

    def built_up(state: Any) -> Any:
        context, sources = "Notes:\n", []
        for i, d in enumerate(state["documents"]):
            short = d.page_content[:12]
            context += f"[{i}] {short} in {len(state['queries'])}\n"
            sources.append(d.metadata.get("source", "?"))
        pairs = []
        for q in state["queries"]:
            words = []
            for letter in q:
                words.append(letter.upper())
            pairs.append(" ".join(words))
        text = ""
        for q in state["queries"]:
            text += llm.invoke(f"{context} {', '.join(sources)} {q} {pairs[0]}").content
        return {"answer": llm.invoke(f"Sum up: {text}").content}

    def retried(state: Any) -> Any:
        answer = ""
        for attempt in range(3):
            answer = llm.invoke(f"Attempt {attempt}: {state['question']}").content
            if "words" in answer:
                break
        return {"answer": answer}

    def until_good(state: Any) -> Any:
        question = state["question"]
        while True:
            answer = llm.invoke(f"Answer {question}").content
            if len(answer) > 3:
                return {"answer": answer}
            question += "!"

    def first_that_fits(state: Any) -> Any:
        for d in state["documents"]:
            if grader.invoke({"question": state["question"], "document": d.page_content}).grade in ("yes", "no"):
                return {"documents": [d]}
        return {"documents": []}

    async def astreamed(state: Any) -> Any:
        pieces = []
        async for chunk in (ANSWER | llm | StrOutputParser()).astream({"context": "", "question": state["question"]}):
            pieces.append(chunk)
        return {"answer": "".join(pieces)}

    return {
        "grade_documents": Case(grade_documents, 3, 3),
        "graded_answer": Case(graded_answer, 4, 4),
        "short_ones": Case(short_ones, 1, 1),
        "until_two": Case(until_two, 3, 4, prefilled=1),
        "built_up": Case(built_up, 4, 4),
        "retried": Case(retried, 1, 1),
        "until_good": Case(until_good, 1, 1),
        "first_that_fits": Case(first_that_fits, 1, 1),
        "astreamed": Case(astreamed, 1, 1),
        "comprehension": Case(comprehension, 3, 3),
        "chosen_items": Case(chosen_items, 2, 2),
        "appended": Case(appended, 4, 4),
        "two_lists": Case(two_lists, 10, 10),
        "batched": Case(batched, 3, 3),
        "gathered": Case(gathered, 4, 4),
        "tasks": Case(tasks, 2, 2),
        "helper_each": Case(helper_each, 6, 6),
        "fixed_list": Case(fixed_list, 2, 2),
        "written_queries": Case(written_queries, 7, 7),
        "carried": Case(carried, 3, 3),
    }


def condition_cases(resources: Resources) -> dict[str, Case]:
    llm, retriever = resources.llm, resources.retriever
    grader = GRADE | llm.with_structured_output(Grade)

    def decided_at_once(state: Any) -> Any:
        verbose, style = False, "short"
        if verbose:
            return {"answer": llm.invoke("At length, " + state["question"]).content}
        return {"answer": llm.invoke(f"{style}: {state['question']}").content if style else ""}

    def known_condition(state: Any) -> Any:
        if state["tries"] > 3:
            return {"answer": "enough"}
        answer = llm.invoke(f"Try {state['tries']}: {state['question']}")
        return {"answer": answer.content, "tries": state["tries"] + 1}

    def two_ways(state: Any) -> Any:
        if "oats" in state["question"]:
            documents = retriever.invoke(state["question"])
            context = formatted(documents)
        else:
            context = llm.invoke(f"What do you know of {state['question']}?").content
        return {"answer": llm.invoke(f"{RULES}\nNotes: {context}\nQuestion: {state['question']}").content}

    def texts_of_either(state: Any) -> Any:
        if state["documents"]:
            context, has_notes = formatted(state["documents"]), True
        else:
            context, has_notes = "There are no notes.", False
        return {"answer": llm.invoke(f"{RULES} {context}").content, "found": has_notes}

    def graded_route(state: Any) -> str:
        """Self-RAG's second router: the second grade is begun before the first is there."""
        question, answer = state["question"], state["answer"]
        score = grader.invoke({"question": question, "document": answer})
        if score.grade in ("yes", "no"):
            better = grader.invoke({"question": question, "document": f"{answer}!"})
            if better.grade == "yes":
                return "useful"
            return "not useful"
        return "not supported"

    def last_has_calls(state: Any) -> Any:
        messages = state["messages"]
        last = messages[-1]
        if isinstance(last, AIMessage) and last.tool_calls:
            return "tools"
        return {"messages": [llm.invoke([SystemMessage(RULES), *messages])]}

    def each_or_not(state: Any) -> Any:
        replies = []
        for q in state["queries"]:
            if q == "ivy":
                continue
            replies.append(llm.invoke(f"What of {q}?").content)
        return {"answer": replies}

    def checked_each(state: Any) -> Any:
        replies = []
        for q in state["queries"]:
            check = llm.invoke(f"Is this allowed? {q}").content
            if check != "no":
                check = llm.invoke(f"{RULES} {q}").content
            replies.append(check)
        return {"answer": replies}

    def raises_first(state: Any) -> Any:
        if not state["question"]:
            raise ValueError("a question is needed")
        try:
            answer = llm.invoke(state["question"]).content
        except RuntimeError:
            answer = "nothing"
        finally:
            logger.debug("answered")
        return {"answer": answer}

    def late_and_both(state: Any) -> Any:
        kind = llm.invoke(f"Which kind is this? {state['question']}").content
        if kind.startswith("so"):
            answer = llm.invoke(f"Plainly: {kind}")
        else:
            answer = llm.invoke(f"With care: {kind}")
        return {"answer": answer.content}

    def checked_answer(state: Any) -> Any:
        """The answer is begun beside the check, which rarely refuses."""
        check = llm.invoke(f"Is this allowed? {state['question']}").content
        if check == "no":
            return {"answer": "I may not say."}
        return {"answer": llm.invoke(f"{RULES} {state['question']}").content}

    return {
        "decided_at_once": Case(decided_at_once, 1, 1),
        "known_condition": Case(known_condition, 1, 1),
        "two_ways": Case(two_ways, 3, 3),
        "texts_of_either": Case(texts_of_either, 1, 1),
        "graded_route": Case(graded_route, 2, 2),
        "last_has_calls": Case(last_has_calls, 1, 1),
        "each_or_not": Case(each_or_not, 2, 2),
        "checked_each": Case(checked_each, 6, 6),
        "raises_first": Case(raises_first, 1, 1),
        "late_and_both": Case(late_and_both, 2, 2),
        "checked_answer": Case(checked_answer, 2, 2),
    }


class Notes(BaseModel):
    """A state that is a pydantic model."""

    question: str
    documents: list[Any] = []
    answer: str = ""


@dataclass
class QuestionState:
    """A state that is a dataclass."""

    question: str
    tries: int = 0


class Agent:
    """An object whose methods are nodes, and which has a model of its own."""

    def __init__(self, resources: Resources) -> None:
        self.llm = resources.llm
        self.rules = RULES
        self._retriever = resources.retriever

    @property
    def hidden(self) -> str:
        OPAQUE_CALLS.append("property")
        return "read by its source"

    def answer(self, state: dict[str, Any]) -> dict[str, Any]:
        documents = self._look(state["question"])
        return {"answer": self.llm.invoke(f"{self.rules}\n{formatted(documents)}").content}

    async def aanswer(self, state: dict[str, Any], config: Any = None) -> dict[str, Any]:
        reply = await self.llm.ainvoke(f"{self.rules}\n{state['question']}", config)
        return {"answer": reply.content}

    def reads_a_property(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"answer": self.llm.invoke(f"{RULES}: {self.hidden}").content}

    def _look(self, query: str) -> list[Document]:
        return self._retriever.invoke(query)

    def __call__(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"answer": self.llm.invoke(state["question"]).content}


def wrapped(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def call(state: Any) -> Any:
        logger.debug("begins")
        return func(state)

    return call


def counted(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return call


def object_cases(resources: Resources) -> dict[str, Case]:
    llm, agent = resources.llm, Agent(resources)
    limits = {"k": 2}

    def pydantic_state(state: Notes) -> Any:
        context = formatted(state.documents)
        return {"answer": (ANSWER | llm).invoke({"context": context, "question": state.question}).content}

    def dataclass_state(state: QuestionState) -> dict[str, Any]:
        return {"answer": llm.invoke(f"{state.tries}: {state.question}").content}

    def configured(state: Any, model: Any, rules: str = RULES, *, k: int = limits["k"]) -> Any:
        return {"answer": model.invoke(f"{rules} {state['question']} {k}").content}

    @wrapped
    def decorated(state: Any) -> Any:
        return {"answer": llm.invoke(state["question"]).content}

    @counted
    def decorated_anyhow(state: Any) -> Any:
        return {"answer": llm.invoke(state["question"]).content}

    def calls_own_code(state: Any) -> Any:
        first = llm.invoke(f"{RULES} First: {state['question']}").content
        second = llm.invoke(f"{RULES * 4} Second: {opaque_code(first)}").content
        return {"answer": second, "documents": resources.retriever.invoke(state["question"])}

    def sets_a_key(state: Any) -> Any:
        update = {"answer": "", **limits}
        update["answer"] = llm.invoke(state["question"]).content
        return update

    return {
        "pydantic_state": Case(pydantic_state, 1, 1, {"question": "oats?", "documents": NOTES}, model=Notes),
        "dataclass_state": Case(dataclass_state, 1, 1, {"question": "oats?", "tries": 2}, model=QuestionState),
        "method": Case(agent.answer, 3, 3),
        "async_method": Case(agent.aanswer, 1, 1),
        "property_of_self": Case(agent.reads_a_property, 1, 1),
        "partial": Case(functools.partial(configured, model=llm), 1, 1),
        "lambda": Case(lambda state: {"answer": llm.invoke(state["question"]).content}, 1, 1),
        "decorated": Case(decorated, 1, 1),
        "decorated_anyhow": Case(decorated_anyhow, 0, 1),
        "calls_own_code": Case(calls_own_code, 3, 4, prefilled=1),
        "sets_a_key": Case(sets_a_key, 1, 1),
    }


def all_cases(resources: Resources) -> dict[str, Case]:
    return {name: case for make_cases in _GROUPS for name, case in make_cases(resources).items()}


_GROUPS = (
    straight_line_cases,
    prompt_cases,
    partly_known_prompt_cases,
    local_object_cases,
    loop_cases,
    condition_cases,
    object_cases,
)
