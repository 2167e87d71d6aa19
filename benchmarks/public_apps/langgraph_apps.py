"""LangGraph apps after public tutorials and templates: graphs with loops, graders, subgraphs, agents."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal, TypedDict

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send
from pydantic import BaseModel, Field

from benchmarks.public_apps.apps import EMBEDDING_MODEL, KEY, MODEL, App
from benchmarks.public_apps.langchain_apps import QUESTION, TEXTS, chat_model, joined, vector_store

MIXED = [*TEXTS[:3], "An off-topic note about the weather."]


class Grade(BaseModel):
    """Binary score for a check."""

    binary_score: str = Field(description="'yes' or 'no'")


class RagState(TypedDict, total=False):
    """The state of the retrieval graphs."""

    question: str
    generation: str
    documents: list[Document]
    web_search: str


ANSWER = ChatPromptTemplate.from_template("Answer from the context.\n{context}\nQuestion: {question}")
GRADE = ChatPromptTemplate.from_messages(
    [("system", "You grade the relevance of a document to a question."), ("human", "{document}\n\n{question}")]
)

# ------------------------------------------------------------ corrective RAG


def corrective_rag(base_url: str) -> Any:
    """Retrieve, grade each document, rewrite the question if one is irrelevant, answer."""
    llm = chat_model(base_url)
    retriever = vector_store(base_url, MIXED).as_retriever(search_kwargs={"k": 4})
    grader = GRADE | llm.with_structured_output(Grade)
    rewriter = ChatPromptTemplate.from_template("Rewrite the question for a web search: {question}") | llm
    rag_chain = ANSWER | llm | StrOutputParser()

    def retrieve(state: RagState) -> RagState:
        print("---RETRIEVE---")
        return {"documents": retriever.invoke(state["question"]), "question": state["question"]}

    def grade_documents(state: RagState) -> RagState:
        print("---CHECK DOCUMENT RELEVANCE TO QUESTION---")
        question = state["question"]
        filtered_docs = []
        web_search = "No"
        for d in state["documents"]:
            score = grader.invoke({"question": question, "document": d.page_content})
            grade = score.binary_score  # type: ignore[union-attr]
            if grade == "yes":
                print("---GRADE: DOCUMENT RELEVANT---")
                filtered_docs.append(d)
            else:
                print("---GRADE: DOCUMENT NOT RELEVANT---")
                web_search = "Yes"
                continue
        return {"documents": filtered_docs, "question": question, "web_search": web_search}

    def transform_query(state: RagState) -> RagState:
        better_question = rewriter.invoke({"question": state["question"]})
        return {"documents": state["documents"], "question": str(better_question.content)}

    def web_search_node(state: RagState) -> RagState:
        documents = [*state["documents"], Document(f"A web page about {state['question']}")]
        return {"documents": documents, "question": state["question"]}

    def generate(state: RagState) -> RagState:
        generation = rag_chain.invoke({"context": joined(state["documents"]), "question": state["question"]})
        return {"documents": state["documents"], "question": state["question"], "generation": generation}

    def decide_to_generate(state: RagState) -> Literal["transform_query", "generate"]:
        return "transform_query" if state["web_search"] == "Yes" else "generate"

    workflow = StateGraph(RagState)
    workflow.add_node("retrieve", retrieve)
    workflow.add_node("grade_documents", grade_documents)
    workflow.add_node("generate", generate)
    workflow.add_node("transform_query", transform_query)
    workflow.add_node("web_search_node", web_search_node)
    workflow.add_edge(START, "retrieve")
    workflow.add_edge("retrieve", "grade_documents")
    workflow.add_conditional_edges("grade_documents", decide_to_generate)
    workflow.add_edge("transform_query", "web_search_node")
    workflow.add_edge("web_search_node", "generate")
    workflow.add_edge("generate", END)
    return workflow.compile()


# ------------------------------------------------------------ adaptive RAG


class Datasource(BaseModel):
    """Route a user query to the most relevant datasource."""

    datasource: Literal["vectorstore", "web_search"]


def adaptive_rag(base_url: str) -> Any:
    """Route, retrieve, grade, answer, then check the answer against the documents and the question."""
    llm = chat_model(base_url)
    retriever = vector_store(base_url, TEXTS).as_retriever(search_kwargs={"k": 4})
    rag_chain = ANSWER | llm | StrOutputParser()

    def route_question(state: RagState) -> str:
        router = ChatPromptTemplate.from_template("Route this question: {question}") | llm.with_structured_output(
            Datasource
        )
        return str(router.invoke({"question": state["question"]}).datasource)  # type: ignore[union-attr]

    def retrieve(state: RagState) -> RagState:
        return {"documents": retriever.invoke(state["question"])}

    def web_search(state: RagState) -> RagState:
        return {"documents": [Document(f"A web page about {state['question']}")]}

    def is_relevant(grade: Any) -> bool:
        return bool(grade.binary_score == "yes")

    def grade_documents(state: RagState) -> RagState:
        grader = GRADE | llm.with_structured_output(Grade)
        kept = [
            document
            for document in state["documents"]
            if is_relevant(grader.invoke({"question": state["question"], "document": document.page_content}))
        ]
        return {"documents": kept}

    def generate(state: RagState) -> RagState:
        context = joined(state["documents"])
        return {"generation": rag_chain.invoke({"context": context, "question": state["question"]})}

    def check_answer(state: RagState) -> str:
        hallucinations = ChatPromptTemplate.from_template("Is it grounded? {documents}\n{generation}")
        usefulness = ChatPromptTemplate.from_template("Does it address the question? {question}\n{generation}")
        structured = llm.with_structured_output(Grade)
        grounded: Any = (hallucinations | structured).invoke(
            {"documents": joined(state["documents"]), "generation": state["generation"]}
        )
        if grounded.binary_score != "yes":
            return "not supported"
        useful: Any = (usefulness | structured).invoke(
            {"question": state["question"], "generation": state["generation"]}
        )
        return "useful" if useful.binary_score == "yes" else "not useful"

    workflow = StateGraph(RagState)
    for node in (retrieve, web_search, grade_documents, generate):
        workflow.add_node(node.__name__, node)
    workflow.add_conditional_edges(START, route_question, {"vectorstore": "retrieve", "web_search": "web_search"})
    workflow.add_edge("web_search", "generate")
    workflow.add_edge("retrieve", "grade_documents")
    workflow.add_edge("grade_documents", "generate")
    workflow.add_conditional_edges(
        "generate", check_answer, {"useful": END, "not useful": "web_search", "not supported": "generate"}
    )
    return workflow.compile()


# ------------------------------------------------------------ a research agent with a subgraph in a loop


class Plan(BaseModel):
    """A research plan."""

    steps: list[str]


class ResearcherState(TypedDict, total=False):
    """The state of the subgraph: one step of the plan."""

    step: str
    queries: str
    notes: str


class ResearchState(TypedDict, total=False):
    """The state of the research graph."""

    question: str
    steps: list[str]
    notes: list[str]
    report: str


def _load_chat_model(base_url: str) -> Any:
    return init_chat_model(f"openai:{MODEL}", base_url=base_url, api_key=KEY, temperature=0)


def research_agent(base_url: str) -> Any:
    """Plan, run a subgraph for each step in a loop, write a report; each node makes its model."""

    async def generate_queries(state: ResearcherState) -> ResearcherState:
        model = _load_chat_model(base_url)
        reply = await model.ainvoke(f"Write search queries for this step: {state['step']}")
        return {"queries": str(reply.content)}

    async def take_notes(state: ResearcherState) -> ResearcherState:
        model = _load_chat_model(base_url)
        reply = await model.ainvoke(f"Take notes on: {state['queries']}")
        return {"notes": str(reply.content)}

    researcher_builder = StateGraph(ResearcherState)
    researcher_builder.add_node("generate_queries", generate_queries)
    researcher_builder.add_node("take_notes", take_notes)
    researcher_builder.add_edge(START, "generate_queries")
    researcher_builder.add_edge("generate_queries", "take_notes")
    researcher = researcher_builder.compile()

    async def create_plan(state: ResearchState) -> ResearchState:
        model = _load_chat_model(base_url).with_structured_output(Plan)
        plan = await model.ainvoke([SystemMessage("Make a research plan."), HumanMessage(state["question"])])
        return {"steps": plan.steps}

    async def conduct_research(state: ResearchState) -> ResearchState:
        notes = []
        for step in state["steps"]:
            result = await researcher.ainvoke({"step": step})
            notes.append(result["notes"])
        return {"notes": notes}

    async def respond(state: ResearchState) -> ResearchState:
        model = _load_chat_model(base_url)
        reply = await model.ainvoke("Write the report from the notes:\n" + "\n".join(state["notes"]))
        return {"report": str(reply.content)}

    builder = StateGraph(ResearchState)
    for node in (create_plan, conduct_research, respond):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "create_plan")
    builder.add_edge("create_plan", "conduct_research")
    builder.add_edge("conduct_research", "respond")
    return builder.compile()


# ------------------------------------------------------------ four analysts in sequence


class TradingState(MessagesState, total=False):
    """The state of the analysts: each clears the messages behind it."""

    company: str
    market_report: str
    sentiment_report: str
    news_report: str
    fundamentals_report: str
    decision: str


ANALYSTS = ("market", "sentiment", "news", "fundamentals")


def analysts(base_url: str) -> Any:
    """Four analysts write their reports one after the other, a trader decides."""
    llm = chat_model(base_url)

    def create_analyst(name: str) -> Any:
        prompt = ChatPromptTemplate.from_messages(
            [("system", "You are the {name} analyst of {company}."), ("placeholder", "{messages}")]
        )
        chain = prompt | llm

        def analyst_node(state: TradingState) -> dict[str, Any]:
            result = chain.invoke({"name": name, "company": state["company"], "messages": state["messages"]})
            return {"messages": [result], f"{name}_report": result.content}

        return analyst_node

    def clear_messages(state: TradingState) -> dict[str, Any]:
        removals = [RemoveMessage(id=str(message.id)) for message in state["messages"]]
        return {"messages": [*removals, HumanMessage("Continue")]}

    def trader(state: TradingState) -> dict[str, Any]:
        reports = "\n\n".join(str(state[f"{name}_report"]) for name in ANALYSTS)  # type: ignore[literal-required]
        return {"decision": llm.invoke(f"Decide about {state['company']} on these reports:\n{reports}").content}

    builder = StateGraph(TradingState)
    previous = START
    for name in ANALYSTS:
        builder.add_node(f"{name}_analyst", create_analyst(name))
        builder.add_node(f"clear_{name}", clear_messages)
        builder.add_edge(previous, f"{name}_analyst")
        builder.add_edge(f"{name}_analyst", f"clear_{name}")
        previous = f"clear_{name}"
    builder.add_node("trader", trader)
    builder.add_edge(previous, "trader")
    return builder.compile()


# ------------------------------------------------------------ an essay writer with a loop of searches


class Queries(BaseModel):
    """Search queries."""

    queries: list[str]


class EssayState(TypedDict, total=False):
    """The state of the essay writer."""

    task: str
    plan: str
    notes: list[str]
    draft: str
    critique: str
    revision: int


def essay_writer(base_url: str) -> Any:
    """Plan an essay, make notes on each query, write a draft, reflect and revise once."""
    model = chat_model(base_url)

    def plan_node(state: EssayState) -> EssayState:
        reply = model.invoke([SystemMessage("Write an outline of an essay."), HumanMessage(state["task"])])
        return {"plan": str(reply.content)}

    def research_node(state: EssayState) -> EssayState:
        found = model.with_structured_output(Queries).invoke(
            [SystemMessage("Generate search queries."), HumanMessage(state["task"])]
        )
        notes = []
        for query in found.queries:  # type: ignore[union-attr]
            response = model.invoke([SystemMessage("Note what is known about the query."), HumanMessage(query)])
            notes.append(str(response.content))
        return {"notes": notes}

    def generation_node(state: EssayState) -> EssayState:
        content = "\n\n".join(state["notes"])
        messages: list[AnyMessage] = [
            SystemMessage(f"Write an essay from these notes:\n{content}"),
            HumanMessage(f"{state['task']}\n\nOutline:\n{state['plan']}\n{state.get('critique', '')}"),
        ]
        return {"draft": str(model.invoke(messages).content), "revision": state.get("revision", 0) + 1}

    def reflection_node(state: EssayState) -> EssayState:
        reply = model.invoke([SystemMessage("You are a teacher grading an essay."), HumanMessage(state["draft"])])
        return {"critique": str(reply.content)}

    def should_continue(state: EssayState) -> str:
        return END if state["revision"] >= 2 else "reflect"

    builder = StateGraph(EssayState)
    builder.add_node("planner", plan_node)
    builder.add_node("research", research_node)
    builder.add_node("generate", generation_node)
    builder.add_node("reflect", reflection_node)
    builder.add_edge(START, "planner")
    builder.add_edge("planner", "research")
    builder.add_edge("research", "generate")
    builder.add_conditional_edges("generate", should_continue, {END: END, "reflect": "reflect"})
    builder.add_edge("reflect", "generate")
    return builder.compile()


# ------------------------------------------------------------ orchestrator and workers: already side by side


class Sections(BaseModel):
    """Sections of a report."""

    sections: list[str]


class ReportState(TypedDict, total=False):
    """The state of the orchestrator."""

    topic: str
    sections: list[str]
    completed: Annotated[list[str], operator.add]
    report: str


class SectionState(TypedDict):
    """The state of one worker."""

    section: str


def orchestrator(base_url: str) -> Any:
    """Plan sections, write them side by side by `Send`, join them."""
    llm = chat_model(base_url)
    planner = llm.with_structured_output(Sections)

    def orchestrate(state: ReportState) -> ReportState:
        plan = planner.invoke([SystemMessage("Plan the sections."), HumanMessage(state["topic"])])
        return {"sections": plan.sections}  # type: ignore[union-attr]

    def write_section(state: SectionState) -> ReportState:
        return {"completed": [str(llm.invoke(f"Write the section {state['section']}").content)]}

    def join_sections(state: ReportState) -> ReportState:
        return {"report": "\n\n".join(state["completed"])}

    def assign(state: ReportState) -> list[Send]:
        return [Send("write_section", {"section": section}) for section in state["sections"]]

    builder = StateGraph(ReportState)
    builder.add_node("orchestrate", orchestrate)
    builder.add_node("write_section", write_section)
    builder.add_node("join_sections", join_sections)
    builder.add_edge(START, "orchestrate")
    builder.add_conditional_edges("orchestrate", assign, ["write_section"])
    builder.add_edge("write_section", "join_sections")
    return builder.compile()


# ------------------------------------------------------------ an agent with two tools: a chain of calls


def weather_agent(base_url: str) -> Any:
    """An agent that calls two tools one after the other."""

    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"It is sunny in {city[:10]}."

    @tool
    def get_time(city: str) -> str:
        """Get the time in a city."""
        return f"It is noon in {city[:10]}."

    return create_agent(chat_model(base_url), tools=[get_weather, get_time], system_prompt="You are helpful.")


# ------------------------------------------------------------ interviews: chains in a loop in a node


class InterviewState(TypedDict, total=False):
    """The state of the interviews."""

    topic: str
    perspectives: list[str]
    interviews: Annotated[list[AnyMessage], add_messages]
    article: str


def interviews(base_url: str) -> Any:
    """Interview an expert from several perspectives, two calls each, then write an article."""
    fast_llm = chat_model(base_url)
    ask = ChatPromptTemplate.from_template("As {perspective}, ask about {topic}") | fast_llm | StrOutputParser()
    reply = ChatPromptTemplate.from_template("As an expert, reply to: {question}") | fast_llm

    async def find_perspectives(state: InterviewState) -> InterviewState:
        text = (await fast_llm.ainvoke(f"Name perspectives on {state['topic']}, separated by newlines")).content
        return {"perspectives": str(text).split("\n")}

    async def conduct_interviews(state: InterviewState) -> InterviewState:
        messages: list[AnyMessage] = []
        for perspective in state["perspectives"]:
            question = await ask.ainvoke({"perspective": perspective, "topic": state["topic"]})
            messages.append(await reply.ainvoke({"question": question}))
        return {"interviews": messages}

    async def write_article(state: InterviewState) -> InterviewState:
        notes = "\n".join(str(message.content) for message in state["interviews"])
        return {"article": str((await fast_llm.ainvoke(f"Write an article from:\n{notes}")).content)}

    builder = StateGraph(InterviewState)
    for node in (find_perspectives, conduct_interviews, write_article):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "find_perspectives")
    builder.add_edge("find_perspectives", "conduct_interviews")
    builder.add_edge("conduct_interviews", "write_article")
    return builder.compile()


# ------------------------------------------------------------ a writer and three critics, until all are content


class CriticState(TypedDict, total=False):
    """The state of the writer."""

    topic: str
    draft: str
    grades: dict[str, str]
    title: str


def writer_and_critics(base_url: str) -> Any:
    """Write, let three critics grade the draft, write once more if one is not content; models are made in nodes."""

    def write(state: CriticState) -> CriticState:
        feedback = f" with this feedback: {state['grades']}" if state.get("grades") else ""
        return {"draft": str(chat_model(base_url).invoke(f"Write a text about {state['topic']}{feedback}").content)}

    def criticize(state: CriticState) -> CriticState:
        critic: Any = chat_model(base_url).with_structured_output(Grade).with_retry(stop_after_attempt=2)
        question = "Is the {quality} of this text good?\n{draft}"
        return {
            "grades": {
                quality: critic.invoke(question.format(quality=quality, draft=state["draft"])).binary_score
                for quality in ("tone", "facts", "style")
            }
        }

    def choose_title(state: CriticState) -> CriticState:
        return {"title": str(chat_model(base_url).invoke(f"Choose a title for: {state['draft']}").content)}

    def route(state: CriticState) -> Literal["write", "choose_title"]:
        return "choose_title" if all(grade == "yes" for grade in state["grades"].values()) else "write"

    builder = StateGraph(CriticState).add_node(write).add_node(criticize).add_node(choose_title)
    builder.add_edge(START, "write").add_edge("write", "criticize").add_conditional_edges("criticize", route)
    return builder.compile()


def _interview_bound(calls: Any) -> float:
    asked, replied = calls.all(", ask about "), calls.all("reply to: ")
    longest = max(first + second for first, second in zip(asked, replied, strict=True))
    return float(calls.one("Name perspectives") + longest + calls.one("Write an article"))


def _research_bound(calls: Any) -> float:
    steps = zip(calls.all("Write search queries for"), calls.all("Take notes on"), strict=True)
    longest = max(queries + notes for queries, notes in steps)
    return float(calls.one("Make a research plan") + longest + calls.one("Write the report"))


def _essay_bound(calls: Any) -> float:
    notes = calls.one("Generate search queries") + calls.longest("Note what is known")
    drafts = sum(calls.all("Write an essay from")) + calls.one("grading an essay")
    return float(max(calls.one("Write an outline"), notes) + drafts)


APPS = [
    App(
        "langgraph corrective RAG",
        corrective_rag,
        {"question": QUESTION},
        lambda calls: (
            calls.one(EMBEDDING_MODEL)
            + calls.longest("You grade the relevance")
            + calls.one("Rewrite the question")
            + calls.one("from the context")
        ),
    ),
    App(
        "langgraph adaptive RAG",
        adaptive_rag,
        {"question": QUESTION},
        lambda calls: (
            calls.one("Route this")
            + calls.one(EMBEDDING_MODEL)
            + calls.longest("You grade the relevance")
            + calls.one("from the context")
            + calls.one("Is it grounded")
            + calls.one("Does it address")
        ),
    ),
    App("research agent with a subgraph", research_agent, {"question": QUESTION}, _research_bound),
    App(
        "four analysts and a trader",
        analysts,
        {"company": "ACME", "messages": [HumanMessage("ACME", id="1")]},
        lambda calls: calls.longest("analyst of ACME") + calls.one("Decide about"),
    ),
    App("essay writer", essay_writer, {"task": QUESTION}, _essay_bound),
    App(
        "orchestrator and workers",
        orchestrator,
        {"topic": QUESTION},
        lambda calls: calls.one("Plan the sections") + calls.longest("Write the section"),
        is_concurrent=True,
    ),
    App(
        "agent with two tools",
        weather_agent,
        {"messages": [HumanMessage(QUESTION, id="1")]},
        lambda calls: sum(calls.all("You are helpful")),
    ),
    App("interviews from several perspectives", interviews, {"topic": QUESTION}, _interview_bound),
    App(
        "writer and three critics",
        writer_and_critics,
        {"topic": QUESTION},
        lambda calls: calls.one("Write a text") + calls.longest("of this text good") + calls.one("Choose a title"),
    ),
]
