"""vLLM's names that are not its API: modules below `vllm.v1`, its configurations, its events, its processes.

`versions` says which vLLM is known and what the installed one lacks; `llm` starts the engine, `processes` decides which
processes it makes, `scheduler` replaces its waiting queue, `drafts` connects drafts to its model runner, `kv_events`,
`stats` and `streams` read its output. Nothing here is imported before it is needed: vLLM takes 5 s to import. What
`vllm.__all__`, `vllm.sampling_params` and the methods of `AsyncLLMEngine` offer is API, and is used where it is needed.
"""
