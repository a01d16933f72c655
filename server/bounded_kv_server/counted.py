"""A route whose requests are counted even where their body is none that it takes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from bounded_kv_server.metrics import metrics


class CountedRoute(APIRoute):
    """What FastAPI refuses before the route's function is called counts as `refused`.

    All else that function counts itself, with its `Clock`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, watched."""
        handle = super().get_route_handler()

        async def counted(request: Request) -> Response:
            try:
                return await handle(request)
            except (RequestValidationError, HTTPException):
                metrics().requests.labels("refused").inc()
                raise

        return counted
