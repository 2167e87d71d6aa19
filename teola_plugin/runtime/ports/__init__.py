"""The way from the runtime to an engine: requests that wait, batches that run, instances that fail."""
