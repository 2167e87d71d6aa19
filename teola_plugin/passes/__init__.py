"""Rewrites of the primitive graph: p-graph in, e-graph out (paper, section 4.2)."""

from teola_plugin.passes.base import GraphCache, Optimised, Pass, PassContext, PassPipeline, PassReport
from teola_plugin.passes.decoding_pipelining import DecodingPipelining
from teola_plugin.passes.draft_decoding import DraftDecoding
from teola_plugin.passes.estimate import ready_times
from teola_plugin.passes.prefilling_split import PrefillingSplit
from teola_plugin.passes.prune_dependencies import PruneDependencies
from teola_plugin.passes.registry import DEFAULT_PASSES, default_pipeline, find_pass, known_passes, resolve_passes
from teola_plugin.passes.stage_decomposition import StageDecomposition

__all__ = [
    "DEFAULT_PASSES",
    "DecodingPipelining",
    "DraftDecoding",
    "GraphCache",
    "Optimised",
    "Pass",
    "PassContext",
    "PassPipeline",
    "PassReport",
    "PrefillingSplit",
    "PruneDependencies",
    "StageDecomposition",
    "default_pipeline",
    "find_pass",
    "known_passes",
    "ready_times",
    "resolve_passes",
]
