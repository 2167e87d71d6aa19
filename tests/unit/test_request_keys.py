"""Tests that request keys are equal for equal types and contents, and only for these."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from pydantic import BaseModel, ConfigDict, PrivateAttr, SecretStr

from teola_plugin.adapters.snapshots import exactly, snapshot
from teola_plugin.request_keys import TargetKey, UnknownValue, freeze

_SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0, float("nan")]) | st.text("ab")
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2)
        | st.builds(HumanMessage, st.text("ab"), additional_kwargs=st.dictionaries(st.text("ab", max_size=1), inner))
    ),
    max_leaves=6,
)


class Settings(BaseModel):
    name: str = "a"
    key: SecretStr = SecretStr("secret")


@given(_VALUES, _VALUES)
def test_keys_are_equal_exactly_where_values_are(one: Any, other: Any) -> None:
    assert (freeze(one) == freeze(other)) == exactly(one, other)


@given(_VALUES)
def test_the_key_of_a_copy_is_the_same_and_hashable(value: Any) -> None:
    assert {freeze(value): 1}[freeze(snapshot(value))] == 1


def test_a_key_does_not_change_with_the_value() -> None:
    message = HumanMessage("a", additional_kwargs={"n": [1]})
    before = freeze(message)
    message.additional_kwargs["n"].append(2)
    assert freeze(message) != before


def test_pydantic_models_are_compared_by_class_and_fields() -> None:
    class Other(Settings):
        pass

    assert freeze(Settings()) == freeze(Settings())
    assert freeze(Settings()) != freeze(Settings(name="b"))
    assert freeze(Settings()) != freeze(Other())


def test_secrets_decide_the_key_and_do_not_appear_in_it() -> None:
    assert freeze(Settings()) != freeze(Settings(key=SecretStr("other")))
    assert "secret" not in repr(freeze(Settings())).replace("SecretStr", "")


def test_an_unknown_object_equals_itself_only() -> None:
    one, other = object(), object()
    assert freeze([one]) == freeze([one])
    assert freeze([one]) != freeze([other])


def test_a_value_that_contains_itself_has_no_key() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnknownValue, match="levels deep"):
        freeze(endless)


def test_special_key_function_overrides_the_default_key() -> None:
    special = lambda value: ("set", len(value)) if isinstance(value, set) else None  # noqa: E731
    assert freeze([{1, 2}], special) == freeze([{3, 4}], special)


class Model(BaseModel):
    temperature: float = 0.0
    callbacks: Any = None
    _answers: list[str] = PrivateAttr(default_factory=list)


class Store:
    """A class that is no pydantic model, so that the effect of its attributes is unknown."""


def test_objects_of_equal_configuration_have_equal_keys() -> None:
    assert TargetKey(Model(temperature=0.5)) == TargetKey(Model(temperature=0.5, callbacks=["mine"]))
    assert TargetKey(Model(temperature=0.5)) != TargetKey(Model(temperature=0.6))


def test_private_attributes_belong_to_the_configuration() -> None:
    one, other = Model(), Model()
    one._answers.append("one")
    assert TargetKey(one) == TargetKey(one)
    assert TargetKey(one) != TargetKey(other)


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")


def test_fields_that_the_class_does_not_declare_belong_to_the_configuration() -> None:
    assert TargetKey(Extra(region="north")) == TargetKey(Extra(region="north"))
    assert TargetKey(Extra(region="north")) != TargetKey(Extra(region="south"))


def test_an_object_without_declared_fields_equals_itself_only() -> None:
    store = Store()
    assert TargetKey(store) == TargetKey(store)
    assert TargetKey(store) != TargetKey(Store())
