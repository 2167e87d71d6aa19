"""Tools that a `TeolaLLM` may call: LlamaIndex's spellings of tools, choices and calls.

`adapters.sampling.tool_text` makes the text that the engine gets, `adapters.tool_calls` reads calls from its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

from teola_plugin.adapters.sampling import ARGUMENTS, ToolText, parse_tool_choice, tool_names, tool_text
from teola_plugin.adapters.tool_calls import certain_text, new_id
from teola_plugin.requests.payloads import Generate

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


@dataclass(frozen=True, slots=True)
class Tools(ToolText):
    """The tools of a call."""

    parallel: bool = True
    """True if more than one of the calls in an answer counts."""

    def added_to(self, request: Generate) -> Generate:
        """Return a request with these tools."""
        schema = self.schema or request.sampling.json_schema
        return replace(
            request,
            prompt=replace(request.prompt, tools=self.definitions),
            sampling=replace(request.sampling, json_schema=schema),
        )

    def response(self, plain: ChatResponse) -> ChatResponse:
        """Return the answer with the calls that its text contains, each with a new id."""
        rest, calls = self.read(plain.message.content or "")
        if not calls:
            return plain
        counted = calls if self.parallel else calls[:1]
        blocks = [ToolCallBlock(tool_call_id=new_id(), tool_name=one.name, tool_kwargs=one.args) for one in counted]
        text = [TextBlock(text=rest)] if rest else []
        message = plain.message.model_copy(update={"blocks": [*text, *blocks]})
        return plain.model_copy(update={"message": message})


_HEADERS = "extra_headers"
"""Headers for HTTP, which LlamaIndex's `DocumentContextExtractor` gives to every LLM; an engine gets none."""


def split_tools(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Tools | None]:
    """Return the arguments of a call without tools and headers, and the tools if any may be called.

    Raise `RegistrationError` for malformed tools, and for a choice that cannot be met.
    """
    rest = {key: value for key, value in kwargs.items() if key not in (*ARGUMENTS, _HEADERS)}
    schemas = list(kwargs.get("tools") or ())
    choice = parse_tool_choice(kwargs.get("tool_choice") or None, tool_names(schemas))
    text = tool_text(schemas, choice)
    if text is None:
        return rest, None
    return rest, Tools(text.definitions, text.names, text.schema, kwargs.get("parallel_tool_calls") is not False)


class StreamedText:
    """The text of a streamed answer that was delivered: with tools, only text that is certainly no call."""

    def __init__(self, tools: Tools | None) -> None:
        self._tools = tools
        self._text = ""
        self.delivered = ""

    def add(self, piece: str) -> str:
        """Add a piece that the engine has written. Return the text that can be delivered now."""
        self._text += piece
        certain = self._text if self._tools is None else certain_text(self._text)
        return self._deliver(certain)

    def rest_of(self, answer: str) -> str:
        """Return the part of the answer's text that was not delivered."""
        return self._deliver(answer)

    def _deliver(self, certain: str) -> str:
        """Return what the text `certain` adds to the delivered text; empty if `certain` begins differently."""
        if not certain.startswith(self.delivered):
            return ""
        delta, self.delivered = certain[len(self.delivered) :], certain
        return delta


class CallsTools(FunctionCallingLLM):
    """An LLM whose `chat` and its like take `tools`, `tool_choice` and `parallel_tool_calls` as OpenAI spells them."""

    __teola_writes_calls__: ClassVar[bool] = True
    """A tool call is text of the answer, so it can be read while it is written."""

    is_function_calling_model: bool = False
    """True if the model may get tools: its chat template must render them."""

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
        """Return the arguments of `chat`. `tool_choice` in `kwargs` is a tool's name, or as OpenAI spells it."""
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg)
        choice = kwargs.pop("tool_choice", None) or ("any" if tool_required else None)
        schemas = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        tool_arguments = {"tools": schemas, "tool_choice": choice, "parallel_tool_calls": allow_parallel_tool_calls}
        return {"messages": messages, **(tool_arguments if schemas else {}), **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls in an answer. Raise `ValueError` if there are none and `error_on_no_tool_call` is set."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError(f"Expected at least one tool call, but got {len(calls)} tool calls.")
        return [_selection(block) for block in calls]


def _selection(block: ToolCallBlock) -> ToolSelection:
    arguments = block.tool_kwargs if isinstance(block.tool_kwargs, dict) else {}
    return ToolSelection(tool_id=block.tool_call_id or "", tool_name=block.tool_name, tool_kwargs=arguments)
