"""Several replicas of an LLM in virtual time: workloads, a simulator, how others route."""
