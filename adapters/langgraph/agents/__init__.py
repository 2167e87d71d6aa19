"""Agents: tools that start while their call is being written, and prompts that are prefilled while tools run."""
