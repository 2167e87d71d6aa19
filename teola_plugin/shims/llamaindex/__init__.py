"""Access to LlamaIndex's private names: parts of its objects, its code run on copies, overridden methods.

Written for `llama-index-core` 0.14. What an installed version does not have is an `Unreadable` at the reader: the
object is not understood then, and runs as the original does.
"""

from __future__ import annotations

from collections.abc import Mapping

from teola_plugin.graph.containers import trust_package

trust_package("llama_index")

EXTENSION_POINTS: Mapping[str, str] = {
    "_get_query_embedding": "BaseEmbedding: implemented by every embedding model",
    "_aget_query_embedding": "the same, async",
    "_get_text_embedding": "the same, of a text that is stored",
    "_aget_text_embedding": "the same, of a text that is stored, async",
    "_get_text_embeddings": "the same, of several texts",
    "_aget_text_embeddings": "the same, of several texts, async",
    "_prepare_chat_with_tools": "FunctionCallingLLM: makes the arguments of a call with tools",
    "_postprocess_nodes": "BaseNodePostprocessor: implemented by every postprocessor",
    "_apostprocess_nodes": "the same, async",
}
"""Methods that LlamaIndex expects its users to implement, so they count as public despite their underscore."""
