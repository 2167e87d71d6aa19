"""LlamaIndex's private names: what its objects are made of, its code run on copies, overridden methods.

Written for `llama-index-core` 0.14. What an installed version does not have is an `Unreadable` at the reader: the
object is not understood then, and runs as it always did.
"""

from __future__ import annotations

from collections.abc import Mapping

EXTENSION_POINTS: Mapping[str, str] = {
    "_get_query_embedding": "BaseEmbedding: what a model of one's own writes",
    "_aget_query_embedding": "the same in a loop",
    "_get_text_embedding": "the same, of a text that is stored",
    "_aget_text_embedding": "the same, of a text that is stored, in a loop",
    "_get_text_embeddings": "the same, of several texts",
    "_aget_text_embeddings": "the same, of several texts in a loop",
    "_prepare_chat_with_tools": "FunctionCallingLLM: what a model of one's own is told of tools",
    "_postprocess_nodes": "BaseNodePostprocessor: what a step of one's own writes",
    "_apostprocess_nodes": "the same in a loop",
}
"""Methods that LlamaIndex asks its users to write, in spite of their underscore: no touch of anything private."""
