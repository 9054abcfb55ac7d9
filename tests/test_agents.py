"""Agent loops: what a subclass must have, and finding one by its name."""

from __future__ import annotations

import asyncio
import pickle
from abc import ABC
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout.agent.agents import (
    AgentLoopRegistry,
    get_agent_loop,
    list_agent_loops,
    register_agent_loop,
    unregister_agent_loop,
)
from rollout.agent.loop import RolloutAgentLoop, RolloutResult
from rollout.agent.tools import tool
from rollout.errors import AgentLoopNotFoundError
from rollout.schemas import RolloutRequest, RolloutStatus


def make_agent(name: str = "tester") -> Any:
    async def run(self: Any, ctx: Any) -> RolloutResult:
        return RolloutResult()

    return type("Agent", (RolloutAgentLoop,), {"name": name, "run": run})()


def make_request() -> RolloutRequest:
    return RolloutRequest(rollout_id="r", server_url="http://t", messages=[], completion_params={})


def test_an_agent_without_run_cannot_be_built() -> None:
    class NoRun(RolloutAgentLoop):
        name = "no-run"

    with pytest.raises(TypeError, match="run"):
        NoRun()  # type: ignore[abstract]


def test_a_concrete_agent_without_a_name_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match="Nameless has no name"):

        class Nameless(RolloutAgentLoop):
            async def run(self, ctx: Any) -> RolloutResult:
                return RolloutResult()

    with pytest.raises(ValueError, match="blank"):
        make_agent("  ")


def test_a_base_class_may_leave_the_name_to_its_subclasses() -> None:
    class Base(RolloutAgentLoop, ABC):
        async def run(self, ctx: Any) -> RolloutResult:
            return RolloutResult()

    class Named(Base):
        name = "named"

    assert asyncio.run(Named().run(None)).status == "COMPLETED"


def test_tools_are_returned_anew_with_methods_bound() -> None:
    schema: dict[str, Any] = {"type": "function"}

    class Counter(RolloutAgentLoop):
        name = "counter"

        @tool
        def step(self) -> str:
            return self.name

        tools = (step, schema)

        async def run(self, ctx: Any) -> RolloutResult:
            return RolloutResult()

    agent = Counter()
    first, second = agent.get_tools(make_request()), agent.get_tools(make_request())
    assert isinstance(first, list)
    assert first is not second
    assert first[0]() == "counter"
    assert first[1] is schema


def test_a_result_starts_empty_and_stays_assignable() -> None:
    result = RolloutResult()
    result.status, result.reward = RolloutStatus.ERROR, 0.5
    assert (result.status, result.reward, result.final_messages, result.finish_reason) == ("ERROR", 0.5, [], "stop")


def test_an_agent_is_found_by_its_name_until_it_is_unregistered() -> None:
    agent = make_agent("found-by-name")
    register_agent_loop(agent)
    assert get_agent_loop("found-by-name") is agent
    assert "found-by-name" in list_agent_loops()
    assert unregister_agent_loop("found-by-name")
    assert not unregister_agent_loop("found-by-name")
    with pytest.raises(AgentLoopNotFoundError, match="'found-by-name' is not registered"):
        get_agent_loop("found-by-name")


def test_a_name_is_given_once() -> None:
    registry = AgentLoopRegistry()
    registry.register(make_agent())
    with pytest.raises(ValueError, match="already registered"):
        registry.register(make_agent())


@pytest.mark.parametrize("name", [None, 5, " "])
def test_an_agent_without_a_usable_name_is_not_registered(name: Any) -> None:
    agent = make_agent()
    agent.name = name
    with pytest.raises(ValueError, match="needs a name"):
        AgentLoopRegistry().register(agent)


def test_an_unknown_name_is_told_with_the_known_ones_and_survives_pickling() -> None:
    registry = AgentLoopRegistry()
    registry.register(make_agent("b"))
    registry.register(make_agent("a"))
    with pytest.raises(AgentLoopNotFoundError) as caught:
        registry.get("c")
    assert str(pickle.loads(pickle.dumps(caught.value))) == "agent loop 'c' is not registered; registered: a, b"


def test_of_many_threads_with_one_name_a_single_one_wins() -> None:
    registry = AgentLoopRegistry()

    def register(agent: Any) -> bool:
        try:
            registry.register(agent)
        except ValueError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(register, [make_agent() for _ in range(50)])) == 1
    registry.clear()
    assert registry.list_agents() == []
