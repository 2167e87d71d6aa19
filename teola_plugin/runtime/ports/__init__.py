"""Ports, the way from the runtime to an engine: queued requests, running batches, replicas that fail."""
