"""Workflows and agents: a run is a query, tools are its parts, the next prompt is prefilled while tools run."""
