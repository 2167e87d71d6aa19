"""Drafts: tokens that the model verifies several at a time, from text that it is likely to repeat.

A custom proposer in stock vLLM, greedy requests only: what the model would write is written, in fewer steps.
"""
