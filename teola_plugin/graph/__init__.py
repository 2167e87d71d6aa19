"""The primitive graph: what an app's query is made of, before and after the passes."""

from teola_plugin.graph.attributes import GAP, Attributes, DraftText
from teola_plugin.graph.build import Shape, build_pgraph
from teola_plugin.graph.client_calls import ClientCalls, LeftToOriginal, MissingValue, UnfitValue
from teola_plugin.graph.containers import holds, items_of, read_path
from teola_plugin.graph.edit import GraphEdit
from teola_plugin.graph.fragment import Fragment
from teola_plugin.graph.graph import Graph
from teola_plugin.graph.growth import Growth, growth, growths
from teola_plugin.graph.instance_path import InstancePath
from teola_plugin.graph.kinds import (
    ENGINE_KINDS,
    FRAGMENT_KINDS,
    IMPURE_KINDS,
    LLM_DECODES,
    LLM_KINDS,
    LLM_PREFILLS,
    PrimitiveKind,
)
from teola_plugin.graph.on_loop import has_own_thread, on_loop, own_thread, runs_on_loop, simple
from teola_plugin.graph.primitive import Primitive, is_impure
from teola_plugin.graph.profile import Batching, Curve, EngineProfile, Profiles
from teola_plugin.graph.query import Query, Terms
from teola_plugin.graph.refs import (
    CARRY,
    INPUT,
    ITEM,
    UNKNOWN_EFFECT,
    Effect,
    Path,
    PromptPart,
    Ref,
    Slice,
    conflict,
    named,
)
from teola_plugin.graph.template import Component, Role, WorkflowTemplate

__all__ = [
    "CARRY",
    "ENGINE_KINDS",
    "FRAGMENT_KINDS",
    "GAP",
    "IMPURE_KINDS",
    "INPUT",
    "ITEM",
    "LLM_DECODES",
    "LLM_KINDS",
    "LLM_PREFILLS",
    "UNKNOWN_EFFECT",
    "Attributes",
    "Batching",
    "ClientCalls",
    "Component",
    "Curve",
    "DraftText",
    "Effect",
    "EngineProfile",
    "Fragment",
    "Graph",
    "GraphEdit",
    "Growth",
    "InstancePath",
    "LeftToOriginal",
    "MissingValue",
    "Path",
    "Primitive",
    "PrimitiveKind",
    "Profiles",
    "PromptPart",
    "Query",
    "Ref",
    "Role",
    "Shape",
    "Slice",
    "Terms",
    "UnfitValue",
    "WorkflowTemplate",
    "build_pgraph",
    "conflict",
    "growth",
    "growths",
    "has_own_thread",
    "holds",
    "is_impure",
    "items_of",
    "named",
    "on_loop",
    "own_thread",
    "read_path",
    "runs_on_loop",
    "simple",
]
