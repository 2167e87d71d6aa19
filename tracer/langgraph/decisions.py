"""Plans of a node, one for each path of conditions on the state, and of settings in the call's configuration.

A plan is made for the answers to the conditions that were evaluated while it was made, in their order. Another state,
or another configuration, has the same plan as long as its answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from teola_plugin.tracer.functions.pure_expressions import Answer, Condition, Decide

T = TypeVar("T")
Make = Callable[[Decide | None], T]
"""Makes a plan; without `Decide`, both paths of each condition stay open."""
MAX_PLANS = 16
"""Plans for one node; a state beyond them has the plan in which nothing is decided."""
MAX_PREPARED_PLANS = 4
"""Plans that are made before there is a state."""


@dataclass(slots=True)
class _TreeNode(Generic[T]):
    """A condition, and the subtree for each answer; without a condition, a plan."""

    condition: Condition | None = None
    plan: T | None = None
    subtrees: dict[Answer, _TreeNode[T]] = field(default_factory=dict)


class PlanTree(Generic[T]):
    """A decision tree: the plans of one node, by the answers to conditions on the state."""

    def __init__(self, make: Make[T]) -> None:
        """Begin without plans. `make`: makes a plan, by a function that decides each condition it comes to.

        `make` gets None in place of that function for the plan in which nothing is decided.
        """
        self._make = make
        self._root: _TreeNode[T] | None = None
        self._undecided_plan: T | None = None
        self._count = 0

    def plan(self, value: Any) -> T | None:
        """Return the plan for a template's input; make it if there is none yet. Raise what `make` raises."""
        leaf = self._find_leaf(lambda condition: condition.answer(value))
        if leaf is not None:
            return leaf.plan
        if self._count < MAX_PLANS:
            return self._make_plan(lambda condition, _: condition.answer(value))[0]
        if self._undecided_plan is None:
            self._undecided_plan = self._make(None)
        return self._undecided_plan

    def ready_plan(self, value: Any) -> tuple[T | None, bool]:
        """Return the plan for this input if it was made before, else the one in which nothing is decided.

        The second result is True if `plan` would return another one.
        """
        leaf = self._find_leaf(lambda condition: condition.answer(value))
        if leaf is not None:
            return leaf.plan, False
        if self._count >= MAX_PLANS and self._undecided_plan is not None:
            return self._undecided_plan, False
        undecided_leaf = self._find_leaf(lambda condition: None)
        return (undecided_leaf.plan if undecided_leaf is not None else self._undecided_plan), True

    def prepare(self, settings: Any = None) -> None:
        """Make the plan in which nothing is decided, and some of the others, so that no query has to wait for them.

        `settings`: an input with the configuration that calls have unless they are given another one. Raise what `make`
        raises.
        """
        if self._root is None:
            self.plan(None)
        has_conditions = self._root is not None and self._root.condition is not None
        pending: list[tuple[Answer, ...]] = [()] if has_conditions else []
        while pending and self._count <= MAX_PREPARED_PLANS:
            fixed_answers = pending.pop(0)

            def answer(condition: Condition, number: int, fixed: Sequence[Answer] = fixed_answers) -> Answer:
                """Answer a condition for a plan that is made in advance.

                The first answers are fixed. Beyond them a setting is answered by `settings`, and any other condition
                holds.
                """
                if number < len(fixed):
                    return fixed[number]
                return condition.answer(settings) if condition.is_setting else True

            _, path = self._make_plan(answer)
            answers = [answer for _, answer in path]
            pending += [
                (*answers[:number], False)
                for number, (condition, _) in enumerate(path)
                if number >= len(fixed_answers) and not condition.is_setting
            ]

    @property
    def is_empty(self) -> bool:
        """Return True if it is known that there is no plan, whatever the state is.

        False while no plan was made: nothing is known then.
        """
        root = self._root
        return root is not None and root.condition is None and root.plan is None

    def _find_leaf(self, answer: Callable[[Condition], Answer]) -> _TreeNode[T] | None:
        """Return the tree's node with the plan for these answers; None if no such plan was made."""
        node = self._root
        while node is not None and node.condition is not None:
            node = node.subtrees.get(answer(node.condition))
        return node

    def _make_plan(self, answer: Callable[[Condition, int], Answer]) -> tuple[T, list[tuple[Condition, Answer]]]:
        """Make a plan. `answer` gets each condition and its number. Return the plan and the answers that led to it."""
        path: list[tuple[Condition, Answer]] = []

        def decide(condition: Condition) -> Answer:
            path.append((condition, answer(condition, len(path))))
            return path[-1][1]

        plan = self._make(decide)
        self._count += 1
        self._insert(path, plan)
        return plan, path

    def _insert(self, path: Sequence[tuple[Condition, Answer]], plan: T) -> None:
        """Add a plan to the tree, in one assignment, because other threads read the tree meanwhile."""
        if self._root is None:
            self._root = _branch(path, plan)
            return
        node = self._root
        for depth, (_, answer) in enumerate(path):
            subtree = node.subtrees.get(answer)
            if subtree is None:
                node.subtrees[answer] = _branch(path[depth + 1 :], plan)
                return
            node = subtree


def _branch(path: Sequence[tuple[Condition, Answer]], plan: T) -> _TreeNode[T]:
    """Return the tree in which the path leads to the plan, and no other path leads anywhere."""
    node = _TreeNode(plan=plan)
    for condition, answer in reversed(path):
        node = _TreeNode(condition, subtrees={answer: node})
    return node
