"""What the pack adds to ComfyUI's server: what the pools do, and an ear for POST /free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable

from aiohttp import web
from server import PromptServer

from .pools import pools

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FREE = ("/free", "/api/free")


async def get_status(request: web.Request) -> web.Response:
    """GET /pipedit/status: a mapping of devices to the state of their pool."""
    return web.json_response(pools.status())


async def get_spans(request: web.Request) -> web.Response:
    """GET /pipedit/spans?since=S: a list of {rank, name, job, start, end}, times in seconds of the monotonic clock."""
    try:
        since = float(request.query.get("since", "0"))
    except ValueError:
        return web.json_response({"error": f"since must be seconds, not {request.query['since']!r}"}, status=400)
    return web.json_response([dataclasses.asdict(span) for span in pools.spans(since)])


@web.middleware
async def unload_on_free(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Unloads the pools when someone asks ComfyUI to unload its models; ComfyUI tells no one else of it."""
    response = await handler(request)
    if request.method == "POST" and request.path in FREE and response.status == 200 and await asks_to_unload(request):
        pools.free()
    return response


async def asks_to_unload(request: web.Request) -> bool:
    """Whether a POST /free names unload_models or free_memory."""
    try:
        wanted = await request.json()
    except json.JSONDecodeError:
        return False
    return isinstance(wanted, dict) and bool(wanted.get("unload_models") or wanted.get("free_memory"))


def add_routes() -> None:
    """Adds everything once; a second call changes nothing (a path with two routes keeps the server from starting)."""
    server = PromptServer.instance
    known = {route.path for route in server.routes if isinstance(route, web.RouteDef)}
    for path, handler in (("/pipedit/status", get_status), ("/pipedit/spans", get_spans)):
        if path not in known:
            server.routes.get(path)(handler)
    if unload_on_free not in server.app.middlewares:
        server.app.middlewares.append(unload_on_free)
