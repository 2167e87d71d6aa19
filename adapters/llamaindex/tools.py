"""Tools that a `TeolaLLM` may call: LlamaIndex's spellings of tools, choices and calls.

What the engine is told is in `adapters.tool_text`, how calls are read from what it writes in `adapters.tool_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

from teola_plugin.adapters.tool_calls import certain_text, new_id
from teola_plugin.adapters.tool_text import ARGUMENTS, ToolText, chosen, tool_names, tool_text
from teola_plugin.requests.payloads import Generate

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


@dataclass(frozen=True, slots=True)
class Tools(ToolText):
    """What a call is told of."""

    parallel: bool = True
    """Whether more than one of the calls in an answer counts."""

    def asked(self, asked: Generate) -> Generate:
        """A request that tells of them."""
        schema = self.schema or asked.sampling.json_schema
        return replace(
            asked,
            prompt=replace(asked.prompt, tools=self.shown),
            sampling=replace(asked.sampling, json_schema=schema),
        )

    def response(self, plain: ChatResponse) -> ChatResponse:
        """The answer, with the calls that it holds, each with an id of its own."""
        rest, calls = self.read(plain.message.content or "")
        if not calls:
            return plain
        found = calls if self.parallel else calls[:1]
        blocks = [ToolCallBlock(tool_call_id=new_id(), tool_name=one.name, tool_kwargs=one.args) for one in found]
        text = [TextBlock(text=rest)] if rest else []
        message = plain.message.model_copy(update={"blocks": [*text, *blocks]})
        return plain.model_copy(update={"message": message})


_HEADERS = "extra_headers"
"""Of a request over HTTP, which LlamaIndex's `DocumentContextExtractor` gives to every LLM; an engine is sent none."""


def taken(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tools | None]:
    """Return the arguments of a call without those of tools, and headers; the tools, if any may be called.

    Raise `RegistrationError` for malformed tools, and a choice that cannot be met.
    """
    rest = {key: value for key, value in kwargs.items() if key not in (*ARGUMENTS, _HEADERS)}
    shown = list(kwargs.get("tools") or ())
    choice = chosen(kwargs.get("tool_choice") or None, tool_names(shown))
    made = tool_text(shown, choice)
    if made is None:
        return rest, None
    return rest, Tools(made.shown, made.names, made.schema, kwargs.get("parallel_tool_calls") is not False)


class Written:
    """What is told of an answer while it is written: with tools, only what is certainly no call."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._text = ""
        self.told = ""

    def add(self, piece: str) -> str:
        """More of it has come; what can be told now that could not be before."""
        self._text += piece
        certain = self._text if self._tools is None else certain_text(self._text)
        return self._tell(certain)

    def rest_of(self, whole: str) -> str:
        """What has not been told of the answer's text."""
        return self._tell(whole)

    def _tell(self, certain: str) -> str:
        if not certain.startswith(self.told):
            return ""
        delta, self.told = certain[len(self.told) :], certain
        return delta


class CallsTools(FunctionCallingLLM):
    """An LLM whose `chat` and its like take `tools`, `tool_choice` and `parallel_tool_calls` as OpenAI spells them."""

    __teola_writes_calls__: ClassVar[bool] = True
    """A call is text of its answer, so what it holds is known while it is written."""

    is_function_calling_model: bool = False
    """Whether the model may be told of tools: its chat template must know of them."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of `chat`. `tool_choice` among `kwargs` is a tool's name, or as OpenAI spells it."""
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        choice = kwargs.pop("tool_choice", None) or ("any" if tool_required else None)
        shown = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        about = {"tools": shown, "tool_choice": choice, "parallel_tool_calls": allow_parallel_tool_calls}
        return {"messages": messages, **(about if shown else {}), **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in an answer. Raises `ValueError` where there are none, and that is an error."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"Expected at least one tool call, but got {len(calls)} tool calls.")
        return [_selection(block) for block in calls]


def _selection(block: ToolCallBlock) -> ToolSelection:
    arguments = block.tool_kwargs if isinstance(block.tool_kwargs, dict) else {}
    return ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=arguments)
