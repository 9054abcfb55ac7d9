"""The service inside an aiohttp application of your own: two agents in one process, beside your own routes.

::

    python -m rollout.examples.embedding
    curl -sS http://127.0.0.1:8080/
    curl -sS http://127.0.0.1:8080/calculator/health

Each mounted application is a whole service with its own limits, and starts and stops with yours. A trainer's base URL
is `http://127.0.0.1:8080/calculator`.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout.examples import calculator, sync_tools
from rollout.server.app import SERVICE, create_app

agent = calculator.agent
"""One of the two, for `rollout validate`."""

MOUNTED = web.AppKey("mounted", dict[str, web.Application])
"""The services by the prefix that they are mounted under."""


def make_app() -> web.Application:
    """The application: an index of our own at `/`, and a service for each agent below its prefix."""
    app = web.Application()
    app[MOUNTED] = {
        "/calculator": create_app(calculator.agent, max_concurrent=50),
        "/librarian": create_app(sync_tools.agent, max_concurrent=10),
    }
    app.router.add_get("/", index)
    for prefix, service in app[MOUNTED].items():
        app.add_subapp(prefix, service)
    return app


async def index(request: web.Request) -> web.Response:
    """GET /: what is served here, and how each of them is."""
    agents: dict[str, Any] = {prefix: app[SERVICE].health() for prefix, app in request.app[MOUNTED].items()}
    return web.json_response({"agents": agents})


def main(port: int = 8080) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    web.run_app(make_app(), host="127.0.0.1", port=port, access_log=None)


if __name__ == "__main__":
    main()
