"""The least time each graph can take: what depends on what, written by hand, with the latencies of idle engines.

Nothing of the product's graphs, passes or schedulers is used; prompts and answers are those of a plain run. Overlap is
free, prefix caches have no block sizes, orchestration takes no time. One prefilling runs at a time; decodings run side
by side. What a branch chooses counts as known: nothing waits for a choice but what reads it, and the end of the query.
A text is known when it is complete, an item of a list and a tool call when they are closed. Code of the user's own that
may do anything (the web search) runs in its place, behind all that decides whether it runs; a tool that is declared to
only read runs when its arguments are known. All times are in seconds since the query came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile

from benchmarks.langchain.bounds import WEB, Costs
from benchmarks.langgraph import agents, rag_graphs, workflows
from benchmarks.langgraph.kits import Call, arguments_end
from benchmarks.rag.apps import tokens_of
from benchmarks.rag.bound import closed_at

GRADED, REWRITTEN = "Retrieved document: ", "Formulate an improved question."


class Known:
    """The calls of a plain run, in its order, and what they cost."""

    def __init__(self, costs: Costs, calls: Sequence[Call], tool_s: float) -> None:
        self.costs, self.calls, self.tool_s = costs, calls, tool_s

    def of(self, phrase: str) -> list[Call]:
        """Calls whose prompts have this in them."""
        return [call for call in self.calls if phrase in call.shown]

    def one(self, phrase: str) -> Call:
        (found,) = self.of(phrase)
        return found

    def prefill(self, text: str) -> float:
        return self.costs.prefill(tokens_of(text))

    def decode(self, text: str) -> float:
        return self.costs.decode(tokens_of(text))

    def whole(self, call: Call) -> float:
        return self.prefill(call.shown) + self.decode(call.text)

    def from_text(self, call: Call, text: str) -> float:
        """Seconds of a call all of whose prompt up to `text` has been prefilled."""
        return self.prefill(call.shown[call.shown.rindex(text) :]) + self.decode(call.text)

    def side_by_side(self, calls: Sequence[Call], ready: Sequence[float]) -> list[float]:
        """When calls that do not need each other are answered: prefilled one by one, what they have in common once."""
        common = shared(calls) if len(calls) > 1 else ""
        at, ends = self.prefill(common), []
        for call, known in zip(calls, ready, strict=True):
            at = max(at, known) + self.prefill(call.shown[len(common) :])
            ends.append(at + self.decode(call.text))
        return ends


def shared(calls: Sequence[Call]) -> str:
    """What all of these prompts begin with."""
    together = zip(*(call.shown for call in calls), strict=False)
    return "".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, together))


# ------------------------------------------------------------ graphs that retrieve


def graded(k: Known) -> float:
    """All documents have been found and graded, none of which needs another."""
    grades = k.of(GRADED)
    return max(k.side_by_side(grades, [k.costs.dense] * len(grades)))


def corrective(k: Known) -> float:
    """The rewriting needs the question only; the web search is run if a document was refused, with what was written."""
    answer, kept = _answer(k)
    if not k.of(REWRITTEN):
        return graded(k) + k.from_text(answer, kept)
    ready = max(graded(k), k.whole(k.one(REWRITTEN)))
    from_web = "\n\n".join(kept.split("\n\n")[-2:])
    before = ready + k.prefill(kept) - k.prefill(from_web)
    return max(before, ready + k.costs.decode(WEB)) + k.from_text(answer, from_web)


def self_rag(k: Known) -> float:
    """Both checks need the answer, and neither the other."""
    answer, kept = _answer(k)
    generated = graded(k) + k.from_text(answer, kept)
    checks = k.of(rag_graphs.HALLUCINATION) + k.of(rag_graphs.USEFUL)
    at, ends = generated, []
    for check in checks:
        ends.append(at + k.from_text(check, answer.text))
        at = ends[-1] - k.decode(check.text)
    return max(ends)


def adaptive(k: Known) -> float:
    """What is found does not depend on where one is told to look; the end does."""
    answer, kept = _answer(k)
    return max(k.whole(k.one(rag_graphs.ROUTER)), graded(k) + k.from_text(answer, kept))


def _answer(k: Known) -> tuple[Call, str]:
    """The call for the answer, and its prompt from the first passage on."""
    answer = k.one(rag_graphs.RAG.partition("{")[0])
    return answer, answer.shown.partition("\nContext: ")[2]


# ------------------------------------------------------------ workflows


def plan_and_execute(k: Known) -> float:
    """A step needs the plan, and its own passages, but no other step; it is searched with when it is closed."""
    plan, *steps, answer = k.calls
    planned = k.whole(plan)
    begun = planned - k.decode(plan.text)
    found = [begun + k.costs.decode(n) + k.costs.dense for n in closed_at(plan.text)]
    head = shared(steps)
    at, ends = planned + k.prefill(head[head.index(":\n") :]), []
    for step, known in zip(steps, found, strict=True):
        passages = step.shown.partition("Use these documents:")[2]
        task = step.shown[len(head) :].removesuffix(passages)
        at = max(at + k.prefill(task), known) + k.prefill(passages)
        ends.append(at + k.decode(step.text))
    return max(ends) + k.from_text(answer, steps[-1].text)


def map_reduce(k: Known) -> float:
    """A joke needs its subject only; the choice needs all jokes."""
    topics, best = k.one(workflows.SUBJECTS.partition("{")[0]), k.one(workflows.BEST.partition("{")[0])
    jokes = sorted(k.of(workflows.JOKE.partition("{")[0]), key=lambda call: topics.text.index(_subject(call)))
    begun = k.prefill(topics.shown)
    ready = [begun + k.costs.decode(n) for n in closed_at(topics.text)[1:]]  # the first string is the field's name
    ends = k.side_by_side(jokes, ready)
    return max(ends) + k.from_text(best, _joke(jokes[-1]))


def _subject(call: Call) -> str:
    return call.prompt.messages[-1].content.removeprefix(workflows.JOKE.partition("{")[0])


def _joke(call: Call) -> str:
    return call.text.removeprefix('{"joke": "').removesuffix('"}')


def one_after_the_other(k: Known) -> float:
    """Each call reads the answer of the one before, behind what is known already."""
    first, *others = k.calls
    now, before = k.whole(first), first
    for call in others:
        now += k.from_text(call, before.text)
        before = call
    return now


def human_interrupt(k: Known) -> float:
    """Two queries. What stands before the draft in the second prompt is known while the draft is written."""
    write, revise = k.calls
    passages = write.shown.partition("Documents:\n\n")[2]
    return k.costs.dense + k.from_text(write, passages) + k.from_text(revise, write.text)


# ------------------------------------------------------------ agents


def rounds(k: Known, calls: Sequence[Call], tool_s: float) -> float:
    """A tool runs when the call is closed. What it gave stands behind all calls of that answer in the next prompt."""
    begun = k.prefill(calls[0].shown)
    for before, call in pairwise(calls):
        results = _results(before, call)
        own = call.shown[len(shared((before, call))) : call.shown.index(results[0])]
        called = [begun + k.decode(before.text[:end]) + tool_s for end in arguments_end(before.text)]
        begun += k.decode(before.text) + k.prefill(own)
        for result, known in zip(results, called, strict=True):
            begun = max(begun, known) + k.prefill(result)
    return begun + k.decode(calls[-1].text)


def _results(before: Call, call: Call) -> list[str]:
    old = sum(message.role == "tool" for message in before.prompt.messages)
    return [message.content for message in call.prompt.messages if message.role == "tool"][old:]


def supervisor(k: Known) -> float:
    """What the agents are told does not depend on who is next; the last decision needs what they said."""
    decisions = k.of(agents.SUPERVISOR)
    *research, write = [call for call in k.calls if call not in decisions]
    found = rounds(k, research, k.costs.dense)
    written = found + k.from_text(write, research[-1].text)
    second = max(found, k.whole(decisions[0])) + k.from_text(decisions[1], research[-1].text)
    return max(written, second) + k.from_text(decisions[2], write.text)


BOUNDS: dict[str, Callable[[Known], float]] = {
    "corrective RAG": corrective,
    "corrective RAG, batch": corrective,
    "self-RAG": self_rag,
    "adaptive router": adaptive,
    "plan-and-execute": plan_and_execute,
    "map-reduce with Send": map_reduce,
    "reflection": one_after_the_other,
    "supervisor": supervisor,
    "ReAct, two retrievers": lambda k: rounds(k, k.calls, k.costs.dense),
    "ReAct, three at once": lambda k: rounds(k, k.calls, k.costs.dense),
    "slow read-only tools": lambda k: rounds(k, k.calls, k.tool_s),
    "human interrupt": human_interrupt,
    "nothing to gain": one_after_the_other,
}
