"""Workflows without a framework: components joined by `>>`, deployed on a pool, run query by query.

Example:
    >>> from teola_plugin.workflow import Generation, Searching, Workflow
    >>> found, answer = Searching("found"), Generation("answer", "{question}\\n{found}")
    >>> ask = Workflow("ask", found >> answer)
    >>> ask.input_schema()["required"]
    ['question']
"""

from teola_plugin.workflow.component import Component, Flow
from teola_plugin.workflow.config import Config
from teola_plugin.workflow.control import Branch, Condition, Loop, Map
from teola_plugin.workflow.decomposition import Decomposition
from teola_plugin.workflow.deployment import Deployment, Result, Running, Stream
from teola_plugin.workflow.functions import Function, Tool
from teola_plugin.workflow.generation import Generation, QueryExpansion, Synthesis
from teola_plugin.workflow.indexing import PER_QUERY, Chunking, Embedding, Indexing, Ingestion
from teola_plugin.workflow.inputs import Input
from teola_plugin.workflow.prompts import Prompt
from teola_plugin.workflow.searching import Reranking, Searching, WebSearch
from teola_plugin.workflow.settings import on_engine, reads, setting
from teola_plugin.workflow.values import Document, Kind, Value
from teola_plugin.workflow.workflow import Workflow

__all__ = [
    "PER_QUERY",
    "Branch",
    "Chunking",
    "Component",
    "Condition",
    "Config",
    "Decomposition",
    "Deployment",
    "Document",
    "Embedding",
    "Flow",
    "Function",
    "Generation",
    "Indexing",
    "Ingestion",
    "Input",
    "Kind",
    "Loop",
    "Map",
    "Prompt",
    "QueryExpansion",
    "Reranking",
    "Result",
    "Running",
    "Searching",
    "Stream",
    "Synthesis",
    "Tool",
    "Value",
    "WebSearch",
    "Workflow",
    "on_engine",
    "reads",
    "setting",
]
