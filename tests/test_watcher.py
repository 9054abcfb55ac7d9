"""What a rollout does, in its trace file and in the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conftest import Serve

from rollout.examples.calculator import CalculatorAgent
from rollout.testing import MockTrainer, status, text, tool_calls
from rollout.traces import file_name


async def events_of(serve: Serve, trainer: MockTrainer, folder: Path, rollout_id: str) -> list[dict[str, Any]]:
    """The trace of one rollout of the calculator, after the service has ended."""
    server = await serve(CalculatorAgent(), debug_dir=str(folder), max_retries=0)
    await server.post_init(rollout_id=rollout_id, api_key="sk-secret")
    await trainer.wait_completed(rollout_id)
    await server.service.stop()
    lines = (folder / file_name(rollout_id)).read_text()
    assert "sk-secret" not in lines
    return [json.loads(line) for line in lines.splitlines()]


async def test_a_trace_holds_every_turn_and_every_tool(serve: Serve, trainer: MockTrainer, tmp_path: Path) -> None:
    trainer.on_chat([tool_calls([("add", {"a": 1, "b": 2})]), text("3")])

    events = await events_of(serve, trainer, tmp_path, "traced")

    assert [event["event"] for event in events] == ["started", "chat", "tool", "chat", "ended"]
    assert (events[2]["name"], events[2]["error"]) == ("add", None)
    assert [event["turn"] for event in events if event["event"] == "chat"] == [1, 2]
    assert events[3]["answer"]["content"] == "3"
    assert events[3]["sent"][-1]["content"] == "3.0"


async def test_a_trace_says_why_an_llm_call_failed(serve: Serve, trainer: MockTrainer, tmp_path: Path) -> None:
    trainer.on_chat([status(400, body={"error": "no such model"})])

    events = await events_of(serve, trainer, tmp_path, "failed")

    assert [event["event"] for event in events] == ["started", "llm_call_failed", "ended"]
    assert "no such model" in events[1]["error"]
