"""What the service says of itself: `/health` and `/status`. Of counts that are kept anyway, so both cost the same with
a million records.
"""

from __future__ import annotations

from typing import Any

from rollout._version import __version__
from rollout.executors.base import Executor
from rollout.metrics import Metrics
from rollout.schemas import Phase
from rollout.settings import RolloutSettings
from rollout.state.outbox import Outbox
from rollout.state.registry import Registry
from rollout.state.sweeper import Sweeper


class Reports:
    """Looks at the parts of one service; changes none."""

    def __init__(
        self,
        agent_name: str,
        settings: RolloutSettings,
        registry: Registry,
        executor: Executor,
        outbox: Outbox,
        sweeper: Sweeper,
    ) -> None:
        self._agent_name = agent_name
        self._settings = settings
        self._registry = registry
        self._executor = executor
        self._outbox = outbox
        self._sweeper = sweeper
        self._started = registry.clock()
        self.is_running = False
        """Whether the background tasks should be alive."""

    @property
    def uptime_seconds(self) -> float:
        """Since the service was made."""
        return round(self._registry.clock() - self._started, 3)

    def problem(self) -> str | None:
        """Why the service is not healthy; None if it is."""
        for name, task in (("sweeper", self._sweeper.task), ("outbox", self._outbox.task)):
            if self.is_running and task is not None and task.done():
                return f"the {name} has died"
        failure = self._registry.store.failure or self._outbox.failure
        return None if failure is None else f"the store fails: {failure}"

    def health(self) -> dict[str, Any]:
        """The body of `/health`."""
        problem = self.problem()
        tally = self._registry.store.tally()
        status = "unhealthy" if problem else "draining" if self._registry.draining else "healthy"
        body: dict[str, Any] = {
            "status": status,
            "agent_loop": self._agent_name,
            "active_rollouts": tally.live,
            "completed_rollouts": tally.records - tally.live,
            "undelivered_rollouts": tally.by_phase[Phase.UNDELIVERED],
            "uptime_seconds": self.uptime_seconds,
            "version": __version__,
        }
        if problem:
            body["reason"] = problem
        return body

    def status(self) -> dict[str, Any]:
        """The body of `/status`."""
        store, tally = self._registry.store, self._registry.store.tally()
        capacity = self._executor.capacity()
        server = self._settings.server
        return {
            "agent": self._agent_name,
            "version": __version__,
            "uptime_seconds": self.uptime_seconds,
            "draining": self._registry.draining,
            "rollouts": {"by_state": tally.by_status, "by_phase": tally.by_phase, "records": tally.records},
            "slots": {"running": capacity.running, "queued": capacity.queued},
            "limits": {
                "max_concurrent_rollouts": server.max_concurrent_rollouts,
                "max_queued_rollouts": server.max_queued_rollouts,
                "rollout_timeout_seconds": server.rollout_timeout_seconds,
                "record_ttl_seconds": server.record_ttl_seconds,
                "max_body_bytes": server.max_body_bytes,
                "max_metadata_size_bytes": self._settings.metadata_limit_bytes,
                "result_cache_bytes": server.result_cache_bytes,
            },
            "store": {
                "kind": store.name,
                "size_bytes": store.size_bytes,
                "failure": store.failure,
                "commits": store.commits,
                "owed_bytes": tally.owed_bytes,
                "held_bytes": tally.held_bytes,
            },
        }

    def feed(self, metrics: Metrics) -> None:
        """Let the gauges read the parts."""
        capacity, store = self._executor.capacity, self._registry.store
        metrics.queue_depth.set_function(lambda: capacity().queued)
        metrics.slots_in_use.set_function(lambda: capacity().running)
        metrics.slots_limit.set_function(lambda: capacity().limit)
        metrics.records_by_status.set_function(lambda: {(s.value,): n for s, n in store.tally().by_status.items()})
        metrics.records_by_phase.set_function(lambda: {(p.value,): n for p, n in store.tally().by_phase.items()})
        metrics.store_bytes.set_function(lambda: store.size_bytes)
        metrics.store_failing.set_function(lambda: float(store.failure is not None))
        metrics.store_commits.set_function(lambda: store.commits)
