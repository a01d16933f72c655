"""The page at `/`: files of the package's folder `page`, as they are.

They hold nothing secret, and vLLM's `--api-key` guards only what is below `/v1`: whoever has no key
can look at the page, and types the key there. All its links are relative, so it works below
`--root-path` too.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from bounded_kv_server.server import server_of

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Not those of the machine's own list, which may have none: a browser runs no script of another."""
HEADERS = {
    # Nothing from elsewhere, nothing inline, and no page around this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept, but asked for again each time: a new version of the server has a new page.
    "Cache-Control": "no-cache",
}


class _Files(StaticFiles):
    """The folder, where the served model speaks."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file, or that it has not changed.

        Raises:
            SpeechError: 404, the model does not speak.
            HTTPException: 404, there is no such file; 405.
        """
        server_of(scope["app"]).speaking()
        response = await super().get_response(path, scope)
        if response.status_code == 200:
            response.headers["Content-Type"] = TYPES[os.path.splitext(path)[1]]
        response.headers.update(HEADERS)
        return response


def attach(app: FastAPI) -> None:
    """Add the page, and the files that it asks for."""
    files = _Files(directory=FOLDER)

    async def index(request: Request) -> Response:
        return await files.get_response(INDEX, request.scope)

    app.add_api_route(
        "/", index, methods=["GET", "HEAD"], include_in_schema=False, response_model=None
    )
    app.mount("/page", files)
