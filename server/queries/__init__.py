"""Queries as resources: submitted, followed, cancelled, kept."""
