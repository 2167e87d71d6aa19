"""Tests of functions whose calls have inputs that are computed of existing lists and dictionaries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import Runnable, RunnableLambda
from support.hosted_model import HostedModel

from teola_plugin import accelerate

ROLES = ["editor", "author", "critic"]
GUIDE = {"a": "Be exact.", "b": "Be kind."}
TOPIC = "oats and rye"
INPUT = {"items": ["a", "b", "c"]}

Use = Callable[[Any, list[str]], Any]


def ask(model: Any, text: str) -> str:
    return str(model.invoke(text).content)


def numbered(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{number} {role} {items}") for number, role in enumerate(ROLES, 1)]


def numbered_in_a_loop(model: Any, items: list[str]) -> list[str]:
    answers = []
    for number, role in enumerate(ROLES):
        answers.append(ask(model, f"{number} {role}"))
    return answers


def sliced(model: Any, items: list[str]) -> list[str]:
    return [ask(model, role) for role in ROLES[:2]]


def sliced_text(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{ROLES[0]} {TOPIC[:4]} {item}") for item in items]


def zipped(model: Any, items: list[str]) -> list[str]:
    answers = []
    for role, item in zip(ROLES, items, strict=False):
        answers.append(ask(model, f"{role} {item}"))
    return answers


def in_order(model: Any, items: list[str]) -> list[str]:
    return [ask(model, role) for role in sorted(ROLES)]


def by_index(model: Any, items: list[str]) -> list[str]:
    return [ask(model, ROLES[index]) for index in range(len(ROLES))]


def joined(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"plan for {', '.join(ROLES)}"), ask(model, f"write for {', '.join(ROLES)}")]


def looked_up(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{item}: {GUIDE.get(item, 'Be brief.')}") for item in items]


def subscripted(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{item}: {GUIDE[item]}") for item in items[:2]]


def keys(model: Any, items: list[str]) -> list[str]:
    answers = []
    for key in GUIDE:
        answers.append(ask(model, f"key {key}"))
    return answers


def listed_keys(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{GUIDE[key]} {number}") for number, key in enumerate(list(GUIDE))]


def members(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{item} {'known' if item in GUIDE else 'new'}") for item in items]


class Panel:
    """An object with a list, and with a dictionary of objects."""

    def __init__(self, model: Any, items: list[str]) -> None:
        self.model, self.roles = model, list(ROLES)
        self.models = {"first": model, "second": model}


def attribute(panel: Panel) -> list[str]:
    return [ask(panel.model, f"{number} {role}") for number, role in enumerate(panel.roles)]


def dictionary_of_objects(panel: Panel) -> list[str]:
    answers = []
    for name in panel.models:
        answers.append(ask(panel.models[name], f"{name} of {len(panel.models)}"))
    return answers


def sorted_keys(panel: Panel) -> list[str]:
    return [ask(panel.models[name], name) for name in sorted(panel.models)]


def build(use: Use, model: Any) -> Runnable[Any, Any]:
    return RunnableLambda(lambda inputs: use(model, inputs["items"]))


def build_panel(use: Callable[[Panel], Any], model: Any) -> Runnable[Any, Any]:
    panel = Panel(model, [])
    return RunnableLambda(lambda inputs: use(panel))


CASES = [
    *[(build, use) for use in (numbered, numbered_in_a_loop, sliced, sliced_text, zipped, in_order, by_index)],
    *[(build, use) for use in (joined, looked_up, subscripted, keys, listed_keys, members)],
    *[(build_panel, use) for use in (attribute, dictionary_of_objects, sorted_keys)],
]


@pytest.mark.parametrize(("make", "use"), CASES, ids=[use.__name__ for _, use in CASES])
def test_calls_with_parts_of_existing_containers_overlap(make: Any, use: Any) -> None:
    original, model = HostedModel(), HostedModel()
    expected = make(use, original).invoke(INPUT)

    assert accelerate(make(use, model)).invoke(INPUT) == expected

    assert model.prompts == original.prompts
    assert original.most_at_once == 1
    assert model.most_at_once >= 2


@pytest.mark.parametrize("use", [numbered, sliced, in_order, joined, by_index])
def test_changed_list_is_read_in_the_next_call(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROLES", [*ROLES])
    original, model = HostedModel(), HostedModel()
    app, fast = build(use, original), accelerate(build(use, model))
    for change in (lambda: None, lambda: ROLES.append("agent"), lambda: ROLES.__setitem__(0, "zealot")):
        change()
        assert fast.invoke(INPUT) == app.invoke(INPUT)

    assert model.prompts == original.prompts
    assert model.most_at_once >= 2


def test_changed_dictionary_is_read_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "GUIDE", dict(GUIDE))
    original, model = HostedModel(), HostedModel()
    app, fast = build(looked_up, original), accelerate(build(looked_up, model))
    for text in ("Be exact.", "Be quick."):
        GUIDE["a"] = text
        assert fast.invoke(INPUT) == app.invoke(INPUT)

    assert model.prompts == original.prompts


def added_before(model: Any, items: list[str]) -> list[str]:
    ROLES.append(items[0])
    return [ask(model, role) for role in ROLES[-2:]]


def added_by_another_name(model: Any, items: list[str]) -> list[str]:
    roles = ROLES if len(items) > 1 else items
    roles.append("agent")
    return [ask(model, role) for role in sorted(ROLES)]


def added_in_each_round(model: Any, items: list[str]) -> list[str]:
    answers = []
    for item in items:
        answers.append(ask(model, f"{', '.join(ROLES)} {item}"))
        ROLES.append(item)
    return answers


def note(item: str) -> str:
    text = ", ".join(ROLES)
    ROLES.append(item)
    return text


def added_by_a_helper(model: Any, items: list[str]) -> list[str]:
    return [ask(model, f"{note(item)} {item}") for item in items]


def compared_by_identity(model: Any, items: list[str]) -> list[str]:
    chosen = [one for one in (items, ROLES) if one is ROLES]
    return [ask(model, f"{len(chosen)} {item}") for item in items]


@pytest.mark.parametrize(
    "use", [added_before, added_by_another_name, added_in_each_round, added_by_a_helper, compared_by_identity]
)
def test_containers_that_a_function_changes_send_the_originals_requests(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    for change in (lambda app: app, accelerate):
        monkeypatch.setitem(globals(), "ROLES", ["editor", "author"])
        model = HostedModel()
        app = change(build(use, model))
        for _ in range(3):
            app.invoke({"items": ["a", "b", "c"]})
        prompts.append(model.prompts)

    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("use", [numbered, looked_up, keys])
def test_error_of_a_call_with_parts_of_a_container_is_the_originals(use: Use) -> None:
    errors = []
    for change in (lambda app: app, accelerate):
        with pytest.raises(ValueError, match="refused") as caught:
            change(build(use, HostedModel(fails_on="a"))).invoke(INPUT)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_missing_key_raises_the_originals_error() -> None:
    def missing(model: Any, items: list[str]) -> list[str]:
        return [ask(model, f"{item}: {GUIDE[item]}") for item in items]

    with pytest.raises(KeyError, match="c"):
        accelerate(build(missing, HostedModel())).invoke(INPUT)
