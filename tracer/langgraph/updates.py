"""What a node does to a graph's state, and the state between two nodes: the values of channels, as symbols."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from langchain_core.messages import BaseMessage, HumanMessage, RemoveMessage, SystemMessage
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from teola_plugin.graph import ITEM, Ref
from teola_plugin.tracer.draft import Span
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    Instance,
    InstancePerItem,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
)
from teola_plugin.tracer.functions.lookup import is_framework_code, is_instance
from teola_plugin.tracer.functions.mutations import Mutations
from teola_plugin.tracer.functions.operations import items_of
from teola_plugin.tracer.functions.pruning import EMPTY_SPAN
from teola_plugin.tracer.functions.symbols import Expression, Item, Unknown
from teola_plugin.tracer.langgraph.shape import ROOT, UpdateRule

MAX_DEPTH = 6
"""Length of the longest path of nodes that is traced after a choice that is not known yet, or round a loop."""
MAX_CERTAIN_DEPTH = 24
"""Length of the longest path of nodes, one after the other, that is traced."""


@dataclass(frozen=True, slots=True)
class LoweredNode:
    """A node, or the function of a conditional edge, after its components were added to a draft."""

    span: Span = EMPTY_SPAN
    updates: Mapping[str, Symbol] | None = None
    """The values that it writes, by channel; None if these are not known."""
    goto: tuple[str, ...] = ()
    """The nodes to which it goes, as far as it names them itself."""
    sends: tuple[InstancePerItem, ...] = ()
    """Tasks that it sends to nodes, one for each item of a list."""
    is_opaque: bool = False
    """True if it runs unknown code, which may take long."""
    mutations: Mutations = field(default_factory=Mutations)
    """The values that it changes in place; channels hold these, too."""
    runs_user_code: bool = False
    """True if code runs that may do anything."""
    pauses: bool = False
    """True if it may interrupt the graph: nothing behind it is certain."""
    changes_objects: bool = False
    """True if it changes attributes or items of objects that later nodes may read: nothing behind it is known."""
    value: Symbol = UNKNOWN_VALUE
    """What it returns."""

    @property
    def is_barrier(self) -> bool:
        """True if no call behind it can be prefetched."""
        return self.pauses or self.changes_objects


EMPTY_NODE = LoweredNode()


@dataclass(frozen=True, slots=True)
class SymbolicState:
    """The state of the graph between two nodes: symbols of the channels' values."""

    values: Mapping[str, Symbol]
    is_late: bool = False
    """True if code that may take long runs before the state is there."""
    is_chosen: bool = False
    """True if a conditional edge on the way here may lead elsewhere."""

    @property
    def max_depth(self) -> int:
        """The length of the longest path of nodes that is traced to this state."""
        return MAX_DEPTH if self.is_chosen else MAX_CERTAIN_DEPTH

    def read(self, names: Iterable[str] | None) -> Symbol:
        """Return the input of a node that reads these channels, or the whole state."""
        if names is None:
            return self.values.get(ROOT, UNKNOWN_VALUE)
        return Fields({name: self.values.get(name, UNKNOWN_VALUE) for name in names}, attributes=True)


def updated_value(rule: UpdateRule, old: Symbol, new: Symbol) -> Symbol:
    """Return the value of a channel after an update."""
    if rule == "replace":
        return new
    if rule == "unknown" or isinstance(old, Unknown):
        return UNKNOWN_VALUE
    old_items: list[Item] = list(old.items) if isinstance(old, ItemList) else [Spread(old)]
    new_items: list[Item] = [new] if isinstance(new, Instance) or _known_message(new) is not None else items_of(new)
    return _add_messages(old_items, new_items) if rule == "messages" else ItemList((*old_items, *new_items))


def _add_messages(items: list[Item], new_items: Iterable[Item]) -> Symbol:
    """Return the messages after `add_messages`, which draws the ids that are missing, and removes by id.

    No prompt shows ids that were drawn, so those of the symbols differ from the original's.
    """
    for item in new_items:
        removed_id = _removed_id(item)
        if isinstance(item, Spread) and isinstance(item.iterable, InstancePerItem):
            if not _removes_all(item.iterable, items):
                return UNKNOWN_VALUE
            items = []
        elif removed_id is None:
            items = [*items, _with_id(item)]
        elif isinstance(removed_id, KnownValue) and removed_id.value == REMOVE_ALL_MESSAGES:
            items = []
        else:
            remaining = [one for one in items if not _is_id_of(removed_id, one)]
            if len(remaining) != len(items) - 1:
                return UNKNOWN_VALUE
            items = remaining
    return ItemList(tuple(items))


def _known_message(item: Item) -> BaseMessage | None:
    return item.value if isinstance(item, KnownValue) and is_instance(item.value, BaseMessage) else None


def _removed_id(item: Item) -> Symbol | None:
    """Return the id of the message that is removed; None for an item that removes none."""
    message = _known_message(item)
    if message is not None:
        return KnownValue(message.id) if type(message) is RemoveMessage else None
    if isinstance(item, Instance) and item.kind is RemoveMessage:
        return item.fields.get("id", UNKNOWN_VALUE)
    return None


def _with_id(item: Item) -> Item:
    """Return a message with an id of the form that `add_messages` draws, unless it has one."""
    message = _known_message(item)
    if message is not None and message.id is None and is_framework_code(type(message)):
        return KnownValue(message.model_copy(update={"id": str(uuid4())}))
    role, content = _role_and_content(item)
    if role in _KINDS_BY_ROLE:
        item = Instance(_KINDS_BY_ROLE[role], {"content": content})
    if isinstance(item, Instance) and "id" not in item.fields:
        return Instance(item.kind, {**item.fields, "id": KnownValue(str(uuid4()))})
    return item


_KINDS_BY_ROLE: Mapping[str, type[BaseMessage]] = {
    **dict.fromkeys(("human", "user"), HumanMessage),
    "system": SystemMessage,
}


def _role_and_content(item: Item) -> tuple[str, Symbol]:
    """Return the parts of `("user", text)` and of `{"role": "user", "content": text}`; "" as the role of other items.

    LangGraph makes messages of such pairs.
    """
    role: Item = UNKNOWN_VALUE
    content: Item = UNKNOWN_VALUE
    if isinstance(item, ItemList) and item.kind is tuple and len(item.items) == 2:
        role, content = item.items
    elif isinstance(item, Fields) and item.base is None and set(item.items) == {"role", "content"}:
        role, content = item.items["role"], item.items["content"]
    if isinstance(role, KnownValue) and type(role.value) is str and not isinstance(content, Spread):
        return role.value, content
    return "", UNKNOWN_VALUE


def are_requests(messages: Symbol) -> bool:
    """Return True if it is known one by one that all messages are a person's or the system's: no model wrote them."""
    if not isinstance(messages, ItemList) or not messages.items:
        return False
    kinds = [item.kind if isinstance(item, Instance) else type(_known_message(item)) for item in messages.items]
    return all(kind in (HumanMessage, SystemMessage) for kind in kinds)


def _is_id_of(message_id: Symbol, item: Item) -> bool:
    """Return True if a symbol is `message.id`, or `str(message.id)`, of a message that stands alone in a list."""
    if isinstance(message_id, KnownValue):
        message = _known_message(item)
        known_id = item.fields.get("id") if isinstance(item, Instance) else None
        own_id = known_id.value if isinstance(known_id, KnownValue) else None if message is None else message.id
        return own_id is not None and own_id == message_id.value
    code = message_id.code if isinstance(message_id, Expression) else None
    if isinstance(code, ast.Call) and isinstance(code.func, ast.Name) and code.func.id == "str" and len(code.args) == 1:
        code = code.args[0]
    if not isinstance(code, ast.Attribute) or code.attr != "id" or not isinstance(code.value, ast.Name):
        return False
    assert isinstance(message_id, Expression)
    return isinstance(item, Ref) and message_id.refs.get(code.value.id) == item


def _removes_all(removals: InstancePerItem, items: list[Item]) -> bool:
    """Return True if there is one removal for each of these messages."""
    read_items = items_of(removals.items)
    return (
        _is_id_of(removals.instance.fields.get("id", UNKNOWN_VALUE), Ref(ITEM))
        and len(read_items) == len(items)
        and all(map(_is_same, read_items, items))
    )


def _is_same(one: Item, other: Item) -> bool:
    """Return True if two symbols are certain to be the same message, or the same messages."""
    if isinstance(one, Spread) and isinstance(other, Spread):
        return _is_same(one.iterable, other.iterable)
    if isinstance(one, Instance) and isinstance(other, Instance):
        return _is_id_of(one.fields.get("id", UNKNOWN_VALUE), other)
    if isinstance(one, Expression) and isinstance(other, Expression):
        return one.code is other.code
    return one == other if isinstance(one, Ref) else one is other or _is_same_value(one, other)


def _is_same_value(one: Item, other: Item) -> bool:
    return isinstance(one, KnownValue) and isinstance(other, KnownValue) and one.value is other.value
