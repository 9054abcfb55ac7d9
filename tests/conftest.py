"""What many tests share: a trainer, and services on real sockets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import pytest
from served import Served, serving

from rollout.testing import MockTrainer

Serve: TypeAlias = Callable[..., Awaitable[Served]]


@pytest.fixture
async def trainer() -> AsyncIterator[MockTrainer]:
    """A MockTrainer with the default answers: every chat is answered "ok", every callback acknowledged."""
    async with MockTrainer() as running:
        yield running


@pytest.fixture
async def serve(trainer: MockTrainer) -> AsyncIterator[Serve]:
    """`server = await serve(agent, **settings)`: a service on a free port, closed when the test ends.

    Settings go by their field names, of the server or of the client. See `served.serving` for the other options.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def start(agent: Any, **options: Any) -> Served:
            return await stack.enter_async_context(serving(agent, trainer, **options))

        yield start


@pytest.fixture
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a caller does wrong is no error of the service."""
    yield
    tracebacks = [r.getMessage() for r in caplog.get_records("call") if r.exc_info and r.levelno > logging.DEBUG]
    assert tracebacks == []
