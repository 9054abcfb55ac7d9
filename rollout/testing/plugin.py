"""The pytest plugin: fixtures for tests of agents, and of whatever else talks to a trainer.

::

    async def test_the_agent_adds(run_agent):
        result = await run_agent(MyAgent(), answers=[tool_calls([("add", {"a": 2, "b": 2})]), text("4")])
        assert result.reward == 1

pytest loads this module at every start: nothing of the package is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

if TYPE_CHECKING:
    from rollout.schemas import RolloutResponse
    from rollout.testing.mock_trainer import MockTrainer

F = TypeVar("F", bound=Callable[..., Any])


def _async_fixture(function: F) -> F:
    try:  # these work in the strict mode of pytest-asyncio too
        from pytest_asyncio import fixture
    except ImportError:  # another plugin (anyio) runs async fixtures as they are
        return cast("F", pytest.fixture(function))
    return cast("F", fixture(function))


@_async_fixture
async def mock_trainer() -> AsyncIterator[MockTrainer]:
    """A running MockTrainer with the default answers."""
    from rollout.testing.mock_trainer import MockTrainer

    async with MockTrainer() as trainer:
        yield trainer


@pytest.fixture
def run_agent() -> Callable[..., Awaitable[RolloutResponse]]:
    """The function `rollout.testing.run_agent`: one agent, one rollout, no server."""
    from rollout.testing.agent_runner import run_agent

    return run_agent
