"""Carries out what the graph scheduler says: one graph driver for the queries of a pool."""
