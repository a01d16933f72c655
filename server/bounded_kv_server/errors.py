"""What a client is told when something cannot be done, in OpenAI's envelope."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "BadRequestError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}
"""By status, as vLLM's own routes name them; every other is an `InternalServerError`."""


class SpeechError(Exception):
    """A request that is refused, or that failed before its first sound."""

    def __init__(
        self, status: int, field: str | None, message: str, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.retry_after_s = status, field, retry_after_s

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {
            "error": {
                "message": str(self),
                "type": TYPES.get(self.status, "InternalServerError"),
                "param": self.field,
                "code": self.status,
            }
        }

    def response(self) -> JSONResponse:
        """The envelope under its status."""
        again = self.retry_after_s
        headers = {} if again is None else {"Retry-After": str(again)}
        return JSONResponse(self.body(), self.status, headers)


GONE_S = 30
"""After which a server whose engine is gone may be back."""


async def answer(_: Request, error: Exception) -> JSONResponse:
    """The app's handler of `SpeechError`."""
    assert isinstance(error, SpeechError)
    return error.response()


def as_status(error: Exception) -> SpeechError:
    """What a failure that nobody foresaw comes to."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, EngineDeadError):
        return SpeechError(503, None, "the engine is gone; the server must be started anew", GONE_S)
    return SpeechError(500, None, f"speech failed: {type(error).__name__}: {error}")
