"""Five applications of the paper, as LangChain and LangGraph apps, made fast by one line.

| application | file |
|---|---|
| search-engine-empowered generation: proxy, judge, web search, core model | `search_engine.py` |
| agent with function calls | `agent.py` |
| questions about an upload, naive RAG: chunk, embed, ingest, top 3, a tree of answers | `naive_rag.py` |
| the same, advanced RAG: 3 more questions, 16 passages each, reranked to 3, refined | `advanced_rag.py` |
| the same, contextual retrieval: a model situates each chunk before it is indexed | `contextual_retrieval.py` |

`llamaindex.py` has the three with an upload in LlamaIndex: an ingestion pipeline, and a query engine.
`workflows.py` has all five without a framework, as components joined by `>>`.

`python -m examples.apps.naive_rag` runs one on real engines of this machine, and prints answer, sources and trace;
`--help` says what else it takes.
"""
