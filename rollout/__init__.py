"""Serve LLM agents to an RL trainer: every accepted rollout ends in exactly one truthful result.

Names are looked up when they are first used, so `import rollout` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollout._version import __version__

if TYPE_CHECKING:
    from rollout.agent.agents import (
        AgentLoopRegistry,
        get_agent_loop,
        list_agent_loops,
        register_agent_loop,
        unregister_agent_loop,
    )
    from rollout.agent.context import (
        LLMClient,
        RolloutContext,
    )
    from rollout.agent.loading import (
        load_agent,
    )
    from rollout.agent.loop import (
        RolloutAgentLoop,
        RolloutResult,
    )
    from rollout.agent.messages import (
        count_messages_by_role,
        get_message_content,
        get_message_role,
        is_assistant_message,
        is_tool_message,
        is_user_message,
        normalize_stop,
        parse_message,
    )
    from rollout.agent.tool_calls import (
        execute_tool_calls,
        get_tool_call_info,
        parse_tool_arguments,
    )
    from rollout.agent.tool_check import (
        ValidationFinding,
    )
    from rollout.agent.tool_results import (
        create_tool_error_result,
        create_tool_result,
        serialize_tool_result,
    )
    from rollout.agent.tools import (
        Tool,
        tool,
    )
    from rollout.agent.validator import (
        AgentLoopValidationError,
        ValidationError,
        ValidationResult,
        validate_agent_loop,
    )
    from rollout.completions import (
        CompletionsResult,
    )
    from rollout.errors import (
        AgentLoadError,
        AgentLoopNotFoundError,
        BadCompletion,
        HistoryRewritten,
        LimitReached,
        LLMError,
        MissingExtra,
        OsmosisRolloutError,
        OsmosisServerError,
        OsmosisTimeoutError,
        OsmosisTransportError,
        OsmosisValidationError,
        RequestRejected,
        RolloutError,
        SettingsError,
        TokenLimitReached,
        ToolArgumentError,
        ToolError,
        ToolExecutionError,
        TrainerError,
        TrainerRefused,
        TrainerTimeout,
        TrainerUnavailable,
        TrainerUnreachable,
        TurnLimitReached,
    )
    from rollout.process import (
        serve_agent_loop,
    )
    from rollout.schemas import (
        DEFAULT_MAX_METADATA_SIZE_BYTES,
        CancelRequest,
        CancelResponse,
        CompletionsChoice,
        CompletionsRequest,
        CompletionsResponse,
        CompletionUsage,
        ErrorCategory,
        ErrorResponse,
        InitResponse,
        MessageDict,
        OpenAIFunctionCallSchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionParsedSchema,
        OpenAIFunctionPropertySchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolCall,
        OpenAIFunctionToolSchema,
        Phase,
        RolloutMetrics,
        RolloutRequest,
        RolloutResponse,
        RolloutState,
        RolloutStatus,
        SamplingParamsDict,
        ToolResponse,
        get_max_metadata_size_bytes,
        set_max_metadata_size_bytes,
    )
    from rollout.server.app import (
        create_app,
    )
    from rollout.settings import (
        RolloutClientSettings,
        RolloutServerSettings,
        RolloutSettings,
    )

_HOMES = {
    "rollout.agent.agents": (
        "AgentLoopRegistry",
        "get_agent_loop",
        "list_agent_loops",
        "register_agent_loop",
        "unregister_agent_loop",
    ),
    "rollout.agent.context": (
        "LLMClient",
        "RolloutContext",
    ),
    "rollout.agent.loading": ("load_agent",),
    "rollout.agent.loop": (
        "RolloutAgentLoop",
        "RolloutResult",
    ),
    "rollout.agent.messages": (
        "count_messages_by_role",
        "get_message_content",
        "get_message_role",
        "is_assistant_message",
        "is_tool_message",
        "is_user_message",
        "normalize_stop",
        "parse_message",
    ),
    "rollout.agent.tool_calls": (
        "execute_tool_calls",
        "get_tool_call_info",
        "parse_tool_arguments",
    ),
    "rollout.agent.tool_check": ("ValidationFinding",),
    "rollout.agent.tool_results": (
        "create_tool_error_result",
        "create_tool_result",
        "serialize_tool_result",
    ),
    "rollout.agent.tools": (
        "Tool",
        "tool",
    ),
    "rollout.agent.validator": (
        "AgentLoopValidationError",
        "ValidationError",
        "ValidationResult",
        "validate_agent_loop",
    ),
    "rollout.completions": ("CompletionsResult",),
    "rollout.errors": (
        "AgentLoadError",
        "AgentLoopNotFoundError",
        "BadCompletion",
        "HistoryRewritten",
        "LLMError",
        "LimitReached",
        "MissingExtra",
        "OsmosisRolloutError",
        "OsmosisServerError",
        "OsmosisTimeoutError",
        "OsmosisTransportError",
        "OsmosisValidationError",
        "RequestRejected",
        "RolloutError",
        "SettingsError",
        "TokenLimitReached",
        "ToolArgumentError",
        "ToolError",
        "ToolExecutionError",
        "TrainerError",
        "TrainerRefused",
        "TrainerTimeout",
        "TrainerUnavailable",
        "TrainerUnreachable",
        "TurnLimitReached",
    ),
    "rollout.process": ("serve_agent_loop",),
    "rollout.schemas": (
        "CancelRequest",
        "CancelResponse",
        "CompletionUsage",
        "CompletionsChoice",
        "CompletionsRequest",
        "CompletionsResponse",
        "DEFAULT_MAX_METADATA_SIZE_BYTES",
        "ErrorCategory",
        "ErrorResponse",
        "InitResponse",
        "MessageDict",
        "OpenAIFunctionCallSchema",
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionParsedSchema",
        "OpenAIFunctionPropertySchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionToolCall",
        "OpenAIFunctionToolSchema",
        "Phase",
        "RolloutMetrics",
        "RolloutRequest",
        "RolloutResponse",
        "RolloutState",
        "RolloutStatus",
        "SamplingParamsDict",
        "ToolResponse",
        "get_max_metadata_size_bytes",
        "set_max_metadata_size_bytes",
    ),
    "rollout.server.app": ("create_app",),
    "rollout.settings": (
        "RolloutClientSettings",
        "RolloutServerSettings",
        "RolloutSettings",
    ),
}
_HOME_OF = {name: module for module, found in _HOMES.items() for name in found}

__all__ = [
    "DEFAULT_MAX_METADATA_SIZE_BYTES",
    "AgentLoadError",
    "AgentLoopNotFoundError",
    "AgentLoopRegistry",
    "AgentLoopValidationError",
    "BadCompletion",
    "CancelRequest",
    "CancelResponse",
    "CompletionUsage",
    "CompletionsChoice",
    "CompletionsRequest",
    "CompletionsResponse",
    "CompletionsResult",
    "ErrorCategory",
    "ErrorResponse",
    "HistoryRewritten",
    "InitResponse",
    "LLMClient",
    "LLMError",
    "LimitReached",
    "MessageDict",
    "MissingExtra",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "OsmosisRolloutError",
    "OsmosisServerError",
    "OsmosisTimeoutError",
    "OsmosisTransportError",
    "OsmosisValidationError",
    "Phase",
    "RequestRejected",
    "RolloutAgentLoop",
    "RolloutClientSettings",
    "RolloutContext",
    "RolloutError",
    "RolloutMetrics",
    "RolloutRequest",
    "RolloutResponse",
    "RolloutResult",
    "RolloutServerSettings",
    "RolloutSettings",
    "RolloutState",
    "RolloutStatus",
    "SamplingParamsDict",
    "SettingsError",
    "TokenLimitReached",
    "Tool",
    "ToolArgumentError",
    "ToolError",
    "ToolExecutionError",
    "ToolResponse",
    "TrainerError",
    "TrainerRefused",
    "TrainerTimeout",
    "TrainerUnavailable",
    "TrainerUnreachable",
    "TurnLimitReached",
    "ValidationError",
    "ValidationFinding",
    "ValidationResult",
    "__version__",
    "count_messages_by_role",
    "create_app",
    "create_tool_error_result",
    "create_tool_result",
    "execute_tool_calls",
    "get_agent_loop",
    "get_max_metadata_size_bytes",
    "get_message_content",
    "get_message_role",
    "get_tool_call_info",
    "is_assistant_message",
    "is_tool_message",
    "is_user_message",
    "list_agent_loops",
    "load_agent",
    "normalize_stop",
    "parse_message",
    "parse_tool_arguments",
    "register_agent_loop",
    "serialize_tool_result",
    "serve_agent_loop",
    "set_max_metadata_size_bytes",
    "tool",
    "unregister_agent_loop",
    "validate_agent_loop",
]


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
