"""Drafts: tokens that the model verifies several at a time, from text that it is likely to repeat.

Greedy requests only: what the model would write is written, in fewer steps. Nothing here knows an engine; tokens are
numbers, those of the engine.
"""
