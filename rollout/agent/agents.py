"""Agent loops by name, for a process that has several."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rollout.errors import AgentLoopNotFoundError

if TYPE_CHECKING:
    from rollout.agent.loop import RolloutAgentLoop


class AgentLoopRegistry:
    """Agent loops by their `name`. Thread-safe: one lock guards the dict."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: dict[str, RolloutAgentLoop] = {}

    def register(self, agent: RolloutAgentLoop) -> None:
        """Make the agent known under its name; `ValueError` if the name is blank or taken."""
        name: Any = getattr(agent, "name", None)
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"an agent loop needs a name to be registered, got {name!r}")
        with self._lock:
            if name in self._agents:
                raise ValueError(f"agent loop {name!r} is already registered; unregister it first, or rename one")
            self._agents[name] = agent

    def unregister(self, name: str) -> bool:
        """Forget the name; whether it was known."""
        with self._lock:
            return self._agents.pop(name, None) is not None

    def get(self, name: str) -> RolloutAgentLoop:
        """The agent of that name, or `AgentLoopNotFoundError` with the names there are."""
        with self._lock:
            agent = self._agents.get(name)
            known = list(self._agents)
        if agent is None:
            raise AgentLoopNotFoundError(name, known)
        return agent

    def list_agents(self) -> list[str]:
        """The names, sorted."""
        with self._lock:
            return sorted(self._agents)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._agents.clear()


_registry = AgentLoopRegistry()


def register_agent_loop(agent: RolloutAgentLoop) -> None:
    """Make the agent known in this process under its name; `ValueError` if the name is blank or taken."""
    _registry.register(agent)


def unregister_agent_loop(name: str) -> bool:
    """Forget the name; whether it was known."""
    return _registry.unregister(name)


def get_agent_loop(name: str) -> RolloutAgentLoop:
    """The agent of that name, or `AgentLoopNotFoundError` with the names there are."""
    return _registry.get(name)


def list_agent_loops() -> list[str]:
    """The names of this process's agent loops, sorted."""
    return _registry.list_agents()
