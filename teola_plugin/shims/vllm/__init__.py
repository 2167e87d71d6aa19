"""vLLM's names that are not its API: modules below `vllm.v1`, its configurations, its events, its processes.

`versions` says which vLLM is known and what the installed one lacks; `llm` starts the engine, `processes` decides which
processes it makes, `scheduler` replaces its waiting queue, `drafts` and `undrafted` are where drafts meet its model
runner, `kv_events`, `stats` and `streams` read what it tells. Nothing here is imported before it is needed: vLLM takes
5 s to import. What `vllm.__all__`, `vllm.sampling_params` and the methods of `AsyncLLMEngine` offer is API, and is used
where it is needed.
"""
