"""Requests to engines: their keys, their results, the callers that wait for them."""
