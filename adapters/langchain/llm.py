"""`TeolaLLM`: a plain-text model on an LLM engine of the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as TextGeneration
from langchain_core.outputs import GenerationChunk, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict

from teola_plugin.adapters.calls import RequestedContext, giving_up
from teola_plugin.adapters.langchain.chat import response_metadata, unstreamed_text
from teola_plugin.adapters.langchain.listening import (
    ConfigScopedModel,
    call_context,
    config_scope,
    requested_context,
    runs_in,
)
from teola_plugin.adapters.sampling import EngineModel, list_shape, schema_drafts
from teola_plugin.errors import RegistrationError
from teola_plugin.graph import PrimitiveKind, on_loop
from teola_plugin.requests.payloads import Generate, Generation, Prompt
from teola_plugin.runtime.loop_thread import CallHandle
from teola_plugin.shims.langchain import prompt_value
from teola_plugin.tracer.leaf import GenerationLeaf

if TYPE_CHECKING:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun


_PREFILLING = PrimitiveKind.PREFILLING


def batch_by_query(
    batch: Any,
    model: Any,
    inputs: list[Any],
    config: RunnableConfig | list[RunnableConfig] | None = None,
    *,
    return_exceptions: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `batch`, LangChain's method of text models, which asks for all texts in one call.

    Call one by one for several queries or request contexts, so that each belongs to its own.
    """
    if not _are_of_one_query(get_config_list(config, len(inputs))):
        return Runnable.batch(model, inputs, config, return_exceptions=return_exceptions, **kwargs)
    with config_scope(config[0] if isinstance(config, list) and config else config):  # type: ignore[arg-type]
        return batch(model, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[no-any-return]


async def abatch_by_query(
    abatch: Any,
    model: Any,
    inputs: list[Any],
    config: RunnableConfig | list[RunnableConfig] | None = None,
    *,
    return_exceptions: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `abatch` as `batch_by_query` calls `batch`."""
    if not _are_of_one_query(get_config_list(config, len(inputs))):
        return await Runnable.abatch(model, inputs, config, return_exceptions=return_exceptions, **kwargs)
    with config_scope(config[0] if isinstance(config, list) and config else config):  # type: ignore[arg-type]
        return await abatch(model, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[no-any-return]


class TeolaLLM(ConfigScopedModel, EngineModel, BaseLLM):
    """Text in, text out, no chat template. Arguments and errors as for `ChatTeola`."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    if not TYPE_CHECKING:  # type checkers see those of the framework's class

        def batch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
            return batch_by_query(BaseLLM.batch, self, inputs, *args, **kwargs)

        async def abatch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
            return await abatch_by_query(BaseLLM.abatch, self, inputs, *args, **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Send all prompts to the engine at once, and return the whole answers."""
        return self._result(self._call(prompts, stop, kwargs, run_manager).result())

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Send all prompts to the engine at once, as `_generate` does, and await the answers."""
        return self._result(await self._call(prompts, stop, kwargs, run_manager))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        """Yield the answer as the engine writes it; the last chunk has what was not streamed, and the usage.

        The request is cancelled if the reader stops before the end.
        """
        handle = self._call([prompt], stop, kwargs, run_manager, stream=True)
        streamed = ""
        with giving_up(handle):
            for piece in handle.pieces:
                streamed += piece.text
                chunk = GenerationChunk(text=piece.text)
                if run_manager:
                    run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk
            yield self._last(handle.result()[0], streamed)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        """Yield the answer as `_stream` does, in a loop."""
        handle = self._call([prompt], stop, kwargs, run_manager, stream=True)
        streamed = ""
        with giving_up(handle):
            async for piece in handle.pieces:
                streamed += piece.text
                chunk = GenerationChunk(text=piece.text)
                if run_manager:
                    await run_manager.on_llm_new_token(piece.text, chunk=chunk)
                yield chunk
            yield self._last((await handle)[0], streamed)

    def _call(
        self,
        prompts: Sequence[str],
        stop: Sequence[str] | None,
        kwargs: Mapping[str, Any],
        run_manager: Any,
        *,
        stream: bool = False,
    ) -> CallHandle:
        """Start one request of the engine for each prompt, in the query that the caller belongs to, if any.

        Raise `RegistrationError` for unknown arguments. With `stream`, pieces of the answer are read while it is
        written.
        """
        sampling = self.sampling(stop, kwargs)
        requests = [Generate(Prompt(text=prompt), sampling) for prompt in prompts]
        run, request_context = call_context(self.pool, run_manager)
        handle: CallHandle = self.pool.call(
            _PREFILLING, self.engine, requests, stream=stream, run=run, request_context=request_context
        )
        return handle

    def _result(self, values: Sequence[Generation]) -> LLMResult:
        """Return the engine's generations as LangChain's result, one choice for each prompt."""
        generations = [
            [TextGeneration(text=v.text, generation_info=response_metadata(v, self.model_name))] for v in values
        ]
        return LLMResult(generations=generations)  # type: ignore[arg-type]

    def _last(self, generation: Generation, streamed: str) -> GenerationChunk:
        text = unstreamed_text(generation, streamed)
        return GenerationChunk(text=text, generation_info=response_metadata(generation, self.model_name))

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> GenerationLeaf | None:
        """Return None also with a response cache: a prefetch would go around it."""
        if self.cache or (self.cache is None and get_llm_cache() is not None):
            return None
        try:
            sampling = self.sampling(None, kwargs)
        except RegistrationError:
            return None
        items, expected = list_shape(sampling.json_schema)
        return GenerationLeaf(
            engine=self.engine,
            payload=lambda value: Generate(Prompt(text=prompt_value(self, value).to_string()), sampling),
            message=on_loop(lambda generation: generation.text),
            items=items,
            expected=expected,
            forms=schema_drafts(sampling.json_schema),
            simple=True,
        )

    @property
    def _llm_type(self) -> str:
        return "teola-llm"


def _are_of_one_query(configs: Sequence[RunnableConfig]) -> bool:
    """Return True if all calls with these configs belong to one query, or to none, with the same context."""
    first = _belonging(configs[0]) if configs else None
    return all(_belonging(config) == first for config in configs[1:])


def _belonging(config: RunnableConfig) -> tuple[RequestedContext, list[int]]:
    return requested_context(config), [id(run) for run in runs_in(config.get("callbacks"))]
