"""Where cases are played: one service and one trainer for all of them, and an agent that uses all that it is sent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from served import Instant, Served, serving

from rollout.agent.context import RolloutContext
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.validator import ValidationResult, validate_agent_loop
from rollout.testing import MockTrainer, ReadResponse, RecordedRequest, Reply, text

NOT_SENT = ("stream", "stream_options")


class Player(RolloutAgentLoop):
    """Chats with the parameters and tools of its request, carries out the calls of the first answer, and ends."""

    name = "player"

    def __init__(self) -> None:
        self.tools_by_id: dict[str, list[Any]] = {}

    def get_tools(self, request: Any) -> list[Any]:
        return self.tools_by_id.get(request.rollout_id, [])

    async def run(self, ctx: RolloutContext) -> RolloutResult:
        params = dict(ctx.request.completion_params)
        if ctx.tools:
            params["tools"] = ctx.tools
        history = list(ctx.request.messages)
        result = await ctx.chat(history, **params)
        history.append(result.message)
        if result.has_tool_calls:
            history += await ctx.call_tools(result.tool_calls)
            history.append((await ctx.chat(history, **params)).message)
        seen = {"finish_reason": result.finish_reason, "token_ids": result.token_ids, "content": result.content}
        return ctx.complete(history, finish_reason=result.finish_reason or "stop", extra_fields=seen)


class Stage:
    """Plays cases against the service."""

    def __init__(self, server: Served, agent: Player) -> None:
        self.server = server
        self.agent = agent
        self._count = 0

    def new_id(self) -> str:
        """An id that no case has had."""
        self._count += 1
        return f"case-{self._count}"

    async def init(
        self, rollout_id: str, *, messages: str = '[{"role":"user","content":"hi"}]', params: str = "{}"
    ) -> ReadResponse:
        """POST an init whose messages and parameters are these very texts."""
        url = json.dumps(self.server.trainer.url)
        body = f'{{"rollout_id":"{rollout_id}","server_url":{url},"messages":{messages},"completion_params":{params}}}'
        return await self.server.post_init(body.encode("utf-8", "surrogatepass"))

    def answer(self, rollout_id: str, *replies: Reply) -> None:
        """What the trainer says to this rollout; afterwards it is done."""
        self.server.trainer.on_chat([*replies, text("done")], rollout_id=rollout_id)

    async def result(self, rollout_id: str) -> dict[str, Any]:
        """The one result, as delivered."""
        callback = await self.server.trainer.wait_completed(rollout_id, accepted=True)
        assert len(self.server.trainer.completions(rollout_id)) == 1
        result: dict[str, Any] = json.loads(callback.body)
        return result

    def chats(self, rollout_id: str) -> list[RecordedRequest]:
        """What the trainer was asked."""
        return self.server.trainer.chats(rollout_id)

    async def play_tool(self, tool: Any) -> None:
        """The tool comes back from init and goes out with the chat exactly as the agent gave it."""
        rollout_id = self.new_id()
        self.agent.tools_by_id[rollout_id] = [tool]
        answer = await self.init(rollout_id)
        assert answer.status == 202, answer
        assert same(json.loads(answer.body), {"rollout_id": rollout_id, "tools": [tool]})
        assert (await self.result(rollout_id))["status"] == "COMPLETED"
        assert same(json.loads(self.chats(rollout_id)[0].body)["tools"], [tool])

    async def play_messages(self, messages: str) -> None:
        """The messages go out with the chat, and home with the result, exactly as they came."""
        rollout_id = self.new_id()
        answer = await self.init(rollout_id, messages=messages)
        assert answer.status == 202, answer
        result = await self.result(rollout_id)
        assert result["status"] == "COMPLETED"
        assert same(json.loads(self.chats(rollout_id)[0].body)["messages"], json.loads(messages))
        assert same(result["final_messages"][:-1], json.loads(messages))

    async def play_params(self, params: str) -> dict[str, Any]:
        """Every parameter goes out unchanged, but for streaming and a bare `stop`; the body that was sent."""
        rollout_id = self.new_id()
        assert (await self.init(rollout_id, params=params)).status == 202
        assert (await self.result(rollout_id))["status"] == "COMPLETED"
        sent: dict[str, Any] = json.loads(self.chats(rollout_id)[0].body)
        given = json.loads(params)
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        assert not [name for name in NOT_SENT if name in sent]
        for name in given.keys() - NOT_SENT:
            assert same(sent[name], given[name]), name
        assert sent["rollout_id"] == rollout_id
        return sent

    async def play_good_completion(self, reply: Reply) -> dict[str, Any]:
        """The turn is a success: the message goes into the history as it came. The result."""
        rollout_id = self.new_id()
        self.answer(rollout_id, reply)
        assert (await self.init(rollout_id)).status == 202
        result = await self.result(rollout_id)
        assert result["status"] == "COMPLETED", result
        choices = json.loads(reply.body)["choices"]
        choice = next((c for c in choices if c.get("index") == 0), choices[0])
        message = choice["message"]
        assert same(result["final_messages"][1], message)
        assert result["extra_fields"]["finish_reason"] == choice.get("finish_reason")
        assert result["finish_reason"] == (choice.get("finish_reason") or "stop")
        calls = message.get("tool_calls") or []
        chats = self.chats(rollout_id)
        assert len(chats) == (2 if calls else 1)
        if calls:
            assert same(json.loads(chats[1].body)["messages"][1], message)
            answers = result["final_messages"][2:-1]
            assert [a["role"] for a in answers] == ["tool"] * len(calls)
            assert [a.get("tool_call_id") for a in answers] == [c.get("id") for c in calls]
        return result

    async def play_failed_call(self, reply: Reply, attempts: int = 1) -> str:
        """The call fails with a clear error, after so many attempts; the rollout ends once. The error's text."""
        rollout_id = self.new_id()
        self.server.trainer.on_chat(reply, rollout_id=rollout_id)
        assert (await self.init(rollout_id)).status == 202
        result = await self.result(rollout_id)
        assert (result["status"], result["finish_reason"], result["error_category"]) == ("ERROR", "error", "llm_error")
        assert len(self.chats(rollout_id)) == attempts
        message = str(result["error_message"])
        for word in ("KeyError", "AttributeError", "IndexError", "NoneType", "TypeError", "ContentTypeError"):
            assert word not in message
        assert 10 < len(message) < 2500
        return message


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same, types of numbers and order of keys included."""
    return json.dumps(one) == json.dumps(other)


def validate_tool(tool: Any) -> ValidationResult:
    """What the validation says of an agent that has this tool."""
    agent = Instant()
    agent.tools = [tool]
    return validate_agent_loop(agent)


@contextlib.asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """A stage for as many cases as there are."""
    agent = Player()
    async with MockTrainer() as trainer, serving(agent, trainer, max_retries=1) as server:
        yield Stage(server, agent)
