"""After a restart: what a dead process left queued or running is ended once, or run once more."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Raw

from rollout.agent.runner import Cause, ended_before
from rollout.errors import StoreError
from rollout.executors.base import Ended, Job
from rollout.logs import counted
from rollout.state.registry import Registry
from rollout.state.store import Record, Restarted

logger = logging.getLogger(__name__)

MOST_RUNS = 3
"""A rollout that has seen so many processes die is ended: it may be what kills them."""


class Recovery:
    """Goes through what the store remembers as live, before anything new is admitted."""

    def __init__(
        self,
        registry: Registry,
        *,
        resumes: bool,
        timeout_seconds: float,
        get_tools: Callable[[Any], Awaitable[Any]],
        submit: Callable[[Job], None],
        end: Callable[[Ended], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._resumes = resumes
        self._timeout_seconds = timeout_seconds
        self._get_tools = get_tools
        self._submit = submit
        self._end = end

    async def run(self) -> None:
        """End or resume every live record. One that cannot be resumed is ended, whatever the reason."""
        records = list(self._registry.live())
        if records:
            what = "runs what it can again" if self._resumes else "reports that as interrupted"
            logger.warning("a process died with %s unfinished; this one %s", counted(len(records), "rollout"), what)
        for record in records:
            job = self._job(record)
            if job is None:
                continue
            if not self._resumes or record.run >= MOST_RUNS:
                await self._interrupt(record, job)
            elif job.deadline is not None and job.deadline <= self._registry.clock():
                await self._interrupt(record, job, Cause.TIMEOUT)
            else:
                await self._resume(record, job)

    def _job(self, record: Record) -> Job | None:
        request = record.request
        if request is None:
            return None
        age = max(0.0, self._registry.wall_clock() - record.created_at)
        accepted = self._registry.clock() - age
        seconds = self._timeout_seconds if request.timeout_seconds is None else request.timeout_seconds
        return Job(
            request=request,
            tools=(),
            accepted=accepted,
            deadline=accepted + seconds if seconds > 0 else None,
            run=record.run,
            checkpoint=record.checkpoint,
        )

    async def _interrupt(self, record: Record, job: Job, cause: Cause = Cause.INTERRUPTED) -> None:
        reached = Raw(b"[]" if record.checkpoint is None else record.checkpoint)
        await self._end(Ended(job=job, outcome=ended_before(record.rollout_id, cause, reached), turn=record.turn))

    async def _resume(self, record: Record, job: Job) -> None:
        try:
            tools = await self._get_tools(job.request)
        except Exception:
            logger.exception("rollout %r: cannot be run again, get_tools() failed", record.rollout_id)
            await self._interrupt(record, job)
            return
        run = record.run + 1
        try:
            await self._registry.store.move(record.rollout_id, Restarted(run=run))
        except StoreError as exc:  # a run that is not counted could go on for ever
            logger.error("rollout %r: cannot be run again, the store fails: %s", record.rollout_id, exc)
            await self._interrupt(record, job)
            return
        logger.info("rollout %r: run %d begins", record.rollout_id, run)
        self._submit(
            Job(
                request=job.request,
                tools=tools,
                accepted=job.accepted,
                deadline=job.deadline,
                run=run,
                checkpoint=job.checkpoint,
            )
        )
