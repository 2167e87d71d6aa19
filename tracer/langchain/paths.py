"""Where in the chain a run of the framework belongs, from its callbacks alone.

LangChain tags the child runs of a composite: `seq:step:2` (from 1), `map:key:context`. A `RunnableAssign` has a run of
its own with one untagged child, its mapper; a `RunnableBinding` has none; the children of `.map()` are untagged and
many, so nothing inside them can be told apart; what a `RunnableWithFallbacks` tries reports beside it, under the same
tag, with the same value. Same tags for invoke, ainvoke, stream and astream.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

NodePath = tuple[str, ...]

UNTAGGED = "mapper"
"""Path element of a child without a tag of its own."""
_CHILD_TAGS = ("seq:step:", "map:key:", "condition:", "branch:", "retry:attempt:")


def step(index: int) -> str:
    """Path element of a sequence's step; `index` counts from 0."""
    return f"seq:step:{index + 1}"


def key(name: str) -> str:
    """Path element of a parallel's key."""
    return f"map:key:{name}"


class PathTracker:
    """Node paths of one query's runs. Feed it every run as it starts, parents first, from any thread.

    The first run without a known parent is the root, path `()`; later ones are strangers and have no path.
    """

    def __init__(self) -> None:
        self._paths: dict[Hashable, NodePath | None] = {}

    def started(
        self, run_id: Hashable, parent_run_id: Hashable | None, tags: Sequence[str] | None, name: str | None = None
    ) -> NodePath | None:
        """The path of the run that starts; None for a stranger."""
        if parent_run_id in self._paths:
            above = self._paths[parent_run_id]
            path = None if above is None else (*above, _element(tags or ()))
        else:
            path = None if self._paths else ()
        self._paths[run_id] = path
        return path

    def path(self, run_id: Hashable) -> NodePath | None:
        """The path of a run that has started; None for a stranger."""
        return self._paths.get(run_id)


def _element(tags: Sequence[str]) -> str:
    return next((tag for tag in tags if tag.startswith(_CHILD_TAGS)), UNTAGGED)


def model_value(result: Any) -> Any:
    """What a model returned, from the `LLMResult` of its `on_llm_end`: a message, or the text of a plain LLM."""
    first = result.generations[0][0]
    return getattr(first, "message", None) or first.text
