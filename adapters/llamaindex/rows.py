"""Conversion between LlamaIndex nodes and rows of a vector store, in the layout of LlamaIndex's own stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llama_index.core.schema import BaseNode, ImageNode, IndexNode, MetadataMode, TextNode
from llama_index.core.vector_stores.types import VectorStoreQueryResult
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from teola_plugin.adapters.plain_data import own_copy
from teola_plugin.requests.payloads import Chunk, Hit, IngestRow, Stored
from teola_plugin.shims.llamaindex.models import NODE_CONTENT, NODE_TYPE

_LISTED_TYPES = (IndexNode.class_name(), ImageNode.class_name())


def to_row(collection: str, node: BaseNode, vector: Sequence[float]) -> IngestRow:
    """Return the row of a node: its text, and everything else in the metadata, by LlamaIndex's own functions."""
    metadata = node_to_metadata_dict(node, remove_text=True)
    chunk = Chunk(node.node_id, node.get_content(metadata_mode=MetadataMode.NONE), metadata)
    return IngestRow(collection, chunk, tuple(vector))


def to_node(row: Stored) -> BaseNode:
    """Return the node of a row; a row that LlamaIndex has not written becomes a `TextNode`."""
    if NODE_CONTENT in row.metadata:
        return metadata_dict_to_node(own_copy(dict(row.metadata)), text=row.text)
    return TextNode(id_=row.id, text=row.text, metadata=own_copy(dict(row.metadata)))


def points_elsewhere(row: Stored) -> bool:
    """Return True for a node of the kinds that an index lists by id even if the store keeps its text."""
    return row.metadata.get(NODE_TYPE) in _LISTED_TYPES


def to_result(hits: Iterable[Hit]) -> VectorStoreQueryResult:
    """Return the nodes, cosine similarities and ids of hits, best first."""
    hits = list(hits)
    return VectorStoreQueryResult(
        nodes=[to_node(hit) for hit in hits], similarities=[hit.score for hit in hits], ids=[hit.id for hit in hits]
    )
