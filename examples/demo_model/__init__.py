"""How the demo's language model and reranker are made: data, training, evaluation. See README.md here."""
