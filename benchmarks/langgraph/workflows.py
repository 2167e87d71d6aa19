"""Workflows of LangGraph's tutorials: plan-and-execute, map-reduce with Send, reflection, a human's word, one node."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.output_parsers import JsonOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send, interrupt
from pydantic import BaseModel

from benchmarks.langgraph.kits import Kit
from benchmarks.langgraph.rag_graphs import format_docs

# ------------------------------------------------------------ plan and execute

PLANNER = (
    "For the given objective, come up with a simple step by step plan. This plan should involve individual tasks, that "
    "if executed correctly will yield the correct answer. Do not add any superfluous steps. Write the steps as a JSON "
    "list of strings.\n\nObjective: {input}"
)


class PlanExecute(TypedDict):
    input: str
    plan: list[str]
    past_steps: Annotated[list[tuple[str, str]], operator.add]
    response: str


def plan_and_execute(kit: Kit) -> Any:
    llm, retriever = kit.llm, kit.retriever()
    planner = ChatPromptTemplate.from_template(PLANNER) | llm | JsonOutputParser()

    def plan_step(state: PlanExecute) -> dict[str, Any]:
        plan = planner.invoke({"input": state["input"]})
        return {"plan": plan}

    def execute_step(state: PlanExecute) -> dict[str, Any]:
        plan = state["plan"]
        done = len(state["past_steps"])
        plan_str = "\n".join(f"{i + 1}. {step}" for i, step in enumerate(plan))
        task = plan[done]
        documents = retriever.invoke(task)
        response = llm.invoke(
            f"For the following plan:\n{plan_str}\n\nYou are tasked with executing step {done + 1}, {task}."
            f"\n\nUse these documents:\n\n{format_docs(documents)}"
        )
        return {"past_steps": [(task, response.content)]}

    def answer(state: PlanExecute) -> dict[str, Any]:
        results = "\n\n".join(f"{task}: {result}" for task, result in state["past_steps"])
        response = llm.invoke(f"Your objective was this: {state['input']}\n\nYou have done these steps:\n\n{results}")
        return {"response": response.content}

    def should_end(state: PlanExecute) -> str:
        return "answer" if len(state["past_steps"]) >= len(state["plan"]) else "agent"

    workflow = StateGraph(PlanExecute)
    workflow.add_node("planner", plan_step)
    workflow.add_node("agent", execute_step)
    workflow.add_node("answer", answer)
    workflow.add_edge(START, "planner")
    workflow.add_edge("planner", "agent")
    workflow.add_conditional_edges("agent", should_end, ["agent", "answer"])
    workflow.add_edge("answer", END)
    return workflow.compile()


# ------------------------------------------------------------ map-reduce

SUBJECTS = "Generate a list of between 2 and 10 examples related to: {topic}."
JOKE = "Generate a joke about {subject}"
BEST = (
    "Below are a bunch of jokes about {topic}. Select the best one! Return the ID of the best one, starting 0 as the "
    "ID for the first joke. Jokes: \n\n  {jokes}"
)


class Subjects(BaseModel):
    subjects: list[str]


class Joke(BaseModel):
    joke: str


class BestJoke(BaseModel):
    id: int


class OverallState(TypedDict):
    topic: str
    subjects: list[str]
    jokes: Annotated[list[str], operator.add]
    best_selected_joke: str


class JokeState(TypedDict):
    subject: str


def map_reduce(kit: Kit, *, topics: type[BaseModel] = Subjects, best: type[BaseModel] = BestJoke) -> Any:
    """`topics` and `best`: schemas with the fields of `Subjects` and `BestJoke`."""
    model = kit.llm

    def generate_topics(state: OverallState) -> dict[str, Any]:
        prompt = SUBJECTS.format(topic=state["topic"])
        response = model.with_structured_output(topics).invoke(prompt)
        return {"subjects": response.subjects}

    def generate_joke(state: JokeState) -> dict[str, Any]:
        prompt = JOKE.format(subject=state["subject"])
        response = model.with_structured_output(Joke).invoke(prompt)
        return {"jokes": [response.joke]}

    def continue_to_jokes(state: OverallState) -> list[Send]:
        return [Send("generate_joke", {"subject": s}) for s in state["subjects"]]

    def best_joke(state: OverallState) -> dict[str, Any]:
        jokes = "\n\n".join(state["jokes"])
        prompt = BEST.format(topic=state["topic"], jokes=jokes)
        response = model.with_structured_output(best).invoke(prompt)
        return {"best_selected_joke": state["jokes"][response.id]}

    graph = StateGraph(OverallState)
    graph.add_node("generate_topics", generate_topics)
    graph.add_node("generate_joke", generate_joke)
    graph.add_node("best_joke", best_joke)
    graph.add_edge(START, "generate_topics")
    graph.add_conditional_edges("generate_topics", continue_to_jokes, ["generate_joke"])
    graph.add_edge("generate_joke", "best_joke")
    graph.add_edge("best_joke", END)
    return graph.compile()


# ------------------------------------------------------------ reflection

WRITES = (
    "You are an essay assistant tasked with writing excellent 5-paragraph essays. Generate the best essay possible for "
    "the user's request. If the user provides critique, respond with a revised version of your previous attempts."
)
GRADES = (
    "You are a teacher grading an essay submission. Generate critique and recommendations for the user's submission. "
    "Provide detailed recommendations, including requests for length, depth, style, etc."
)


def reflection(kit: Kit) -> Any:
    """A draft, then twice a critique and a revision."""

    def spoken(system: str) -> Any:
        prompt = ChatPromptTemplate.from_messages([("system", system), MessagesPlaceholder(variable_name="messages")])
        return prompt | kit.llm

    generate, reflect = spoken(WRITES), spoken(GRADES)

    def generation_node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [generate.invoke({"messages": state["messages"]})]}

    def reflection_node(state: MessagesState) -> dict[str, Any]:
        cls_map: dict[str, type[BaseMessage]] = {"ai": HumanMessage, "human": AIMessage}
        translated = [state["messages"][0]] + [cls_map[msg.type](content=msg.content) for msg in state["messages"][1:]]
        res = reflect.invoke({"messages": translated})
        return {"messages": [HumanMessage(content=res.content)]}

    def should_continue(state: MessagesState) -> str:
        return END if len(state["messages"]) > 5 else "reflect"

    builder = StateGraph(MessagesState)
    builder.add_node("generate", generation_node)
    builder.add_node("reflect", reflection_node)
    builder.add_edge(START, "generate")
    builder.add_conditional_edges("generate", should_continue, ["reflect", END])
    builder.add_edge("reflect", "generate")
    return builder.compile()


# ------------------------------------------------------------ a human's word


class ReviewState(TypedDict):
    question: str
    documents: str
    draft: str
    feedback: str
    answer: str


def human_interrupt(kit: Kit) -> Any:
    """A draft is shown to a human, and revised with what the human says."""
    llm, retriever = kit.llm, kit.retriever()

    def retrieve(state: ReviewState) -> dict[str, Any]:
        return {"documents": format_docs(retriever.invoke(state["question"]))}

    def write(state: ReviewState) -> dict[str, Any]:
        response = llm.invoke(
            f"Answer with the documents below.\n\nQuestion: {state['question']}\n\nDocuments:\n\n{state['documents']}"
        )
        return {"draft": response.content}

    def human_review(state: ReviewState) -> dict[str, Any]:
        feedback = interrupt({"question": "Is this right?", "draft": state["draft"]})
        return {"feedback": feedback}

    def revise(state: ReviewState) -> dict[str, Any]:
        response = llm.invoke(
            f"Revise a draft as its reader asks.\n\nQuestion: {state['question']}\n\nDocuments:\n\n{state['documents']}"
            f"\n\nDraft: {state['draft']}\n\nFeedback: {state['feedback']}"
        )
        return {"answer": response.content}

    builder = StateGraph(ReviewState)
    builder.add_sequence([retrieve, write, human_review, revise])
    builder.add_edge(START, "retrieve")
    return builder.compile(checkpointer=InMemorySaver())


# ------------------------------------------------------------ nothing to gain


def one_node(kit: Kit) -> Any:
    llm = kit.llm

    def chatbot(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("chatbot", chatbot)
    builder.add_edge(START, "chatbot")
    builder.add_edge("chatbot", END)
    return builder.compile()
