"""The trainer without a GPU, and what else tests of agents and of the service need.

Names are resolved when they are first used, so that the pytest plugin costs nothing where it is not used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.testing.agent_runner import run_agent
    from rollout.testing.builders import make_completion, make_request, make_tool_call
    from rollout.testing.client import ReadResponse, drive, post_init
    from rollout.testing.fakes import FakeClock, ScriptedCall, ScriptedLLM
    from rollout.testing.faults import (
        Answer,
        Hold,
        Reply,
        close_after_answer,
        close_before_answer,
        completion,
        delay,
        garbage,
        half_body,
        hang,
        hold,
        huge,
        lost_acknowledgement,
        raw,
        redirect,
        reset,
        slow_bytes,
        status,
        text,
        tool_calls,
        wrong_content_type,
    )
    from rollout.testing.mock_trainer import MockTrainer
    from rollout.testing.peer import Peer, RecordedRequest
    from rollout.testing.proxy import ChaosProxy, Flow

__all__ = [
    "Answer",
    "ChaosProxy",
    "FakeClock",
    "Flow",
    "Hold",
    "MockTrainer",
    "Peer",
    "ReadResponse",
    "RecordedRequest",
    "Reply",
    "ScriptedCall",
    "ScriptedLLM",
    "close_after_answer",
    "close_before_answer",
    "completion",
    "delay",
    "drive",
    "garbage",
    "half_body",
    "hang",
    "hold",
    "huge",
    "lost_acknowledgement",
    "make_completion",
    "make_request",
    "make_tool_call",
    "post_init",
    "raw",
    "redirect",
    "reset",
    "run_agent",
    "slow_bytes",
    "status",
    "text",
    "tool_calls",
    "wrong_content_type",
]

_HOMES = {
    "agent_runner": ("run_agent",),
    "builders": ("make_completion", "make_request", "make_tool_call"),
    "client": ("ReadResponse", "drive", "post_init"),
    "fakes": ("FakeClock", "ScriptedCall", "ScriptedLLM"),
    "mock_trainer": ("MockTrainer",),
    "peer": ("Peer", "RecordedRequest"),
    "proxy": ("ChaosProxy", "Flow"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME_OF.get(name, 'faults')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
