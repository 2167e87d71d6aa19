"""Drafts in stock vLLM: a custom proposer, which asks `engines.drafts` what each row may repeat."""
