"""`GET /v1/bounded_kv`, fresh figures on `/metrics`, and pinned sources.

An endpoint plugin in vLLM's sense, turned on by `--kv-plugin bounded` itself (see `compat`).
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_bounded_kv import metrics
from vllm_bounded_kv.engine import end, extensions, replicas, source_routes
from vllm_bounded_kv.engine.compat import FIGURES_METHOD
from vllm_bounded_kv.engine.named_source import NamedSourceMiddleware
from vllm_bounded_kv.engine.settings import policy_of

FIGURES_TIMEOUT_S = 5.0
"""How long a scrape waits for an engine that is in the middle of a step."""


class BoundedKVEndpoint:
    """Adds the plugin's routes to vLLM's server."""

    name = "bounded"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes. `/metrics` replaces vLLM's, which cannot fetch before it answers."""
        app.add_api_route("/v1/bounded_kv", _show, methods=["GET"], tags=["bounded_kv"])
        app.add_api_route(
            "/metrics", _metrics, methods=["GET"], include_in_schema=False, response_model=None
        )
        source_routes.attach(app)
        for extension in extensions.installed():
            extension.attach_router(app)
        app.add_middleware(NamedSourceMiddleware, get_engine=lambda: app.state.bounded_kv_engine)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep the engine at hand and show the metrics, at zero, from the start."""
        state.bounded_kv_engine = engine_client
        metrics.create(replicas.numbers(engine_client))
        state.bounded_kv_ending = asyncio.Event()
        if os.environ.get("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "0") == "0":  # as vLLM's own watchdog
            state.bounded_kv_watch = asyncio.create_task(end.watch(engine_client, state))
        for extension in extensions.installed():
            await extension.init_state(engine_client, state, args)


async def fetch_figures(engine_client: Any, mark_read: bool = False) -> replicas.Answers:
    """Ask the engine core, or those of all replicas, for their figures."""
    return await replicas.ask_all(engine_client, FIGURES_METHOD, mark_read)


async def _show(request: Request) -> JSONResponse:
    """The cache as JSON: policy, slots, and where every running stream stands."""
    engine = request.app.state.bounded_kv_engine
    try:
        answers = await asyncio.wait_for(fetch_figures(engine), FIGURES_TIMEOUT_S)
    except TimeoutError:
        return _not_now(f"the engine did not answer within {FIGURES_TIMEOUT_S} s; try again")
    except replicas.EngineGone as error:
        return _not_now(str(error))
    for answer in answers.values():
        del answer["ring_wraps_unread"]
    policy = policy_of(engine.vllm_config)
    assert policy is not None
    return JSONResponse({"policy": policy.to_mapping(), **replicas.all_figures(answers)})


def _not_now(message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=503, headers={"Retry-After": "1"})


async def _metrics(request: Request) -> Response:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    fetch = asyncio.ensure_future(fetch_figures(request.app.state.bounded_kv_engine, True))
    fetch.add_done_callback(_take_over)  # a late answer still counts
    await asyncio.wait([fetch], timeout=FIGURES_TIMEOUT_S)
    return Response(
        prometheus_client.generate_latest(get_prometheus_registry()),
        media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )


def _take_over(fetch: asyncio.Future[replicas.Answers]) -> None:
    if not fetch.cancelled() and fetch.exception() is None:
        for number, figures in fetch.result().items():
            metrics.update(number, figures)
