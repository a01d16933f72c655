"""What a client is told when something cannot be done, in OpenAI's envelope."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from bounded_kv_speech.turns import StreamAborted, StreamFull, TooManyStreams

_logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    408: "BadRequestError",
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
FULL_S = 2
"""After which there may be room again."""


async def answer(_: Request, error: Exception) -> JSONResponse:
    """The app's handler of `SpeechError`."""
    assert isinstance(error, SpeechError)
    return error.response()


def ending() -> SpeechError:
    """A server that has been told to end."""
    return SpeechError(503, None, "the server is shutting down", GONE_S)


def as_status(error: Exception) -> SpeechError:
    """What a failure of the engine or the decoder comes to; one that nobody foresaw is logged."""
    from torch import OutOfMemoryError
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
    from vllm.v1.engine.async_llm import InputStreamError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, EngineDeadError):
        return SpeechError(503, None, "the engine is gone; the server must be started anew", GONE_S)
    if isinstance(error, StreamAborted):
        return ending()
    if isinstance(error, GracefulHTTPError) and error.http_status != 503:
        return SpeechError(int(error.http_status), None, str(error))
    if isinstance(error, GracefulHTTPError | RetryableRequestError | TooManyStreams):
        return SpeechError(503, None, str(error), FULL_S)
    if isinstance(error, OutOfMemoryError | MemoryError):
        return SpeechError(503, None, "there is no memory for this now; try again soon", FULL_S)
    if isinstance(error, StreamFull):
        return SpeechError(413, "input", f"there is more to say than one stream takes: {error}")
    # What vLLM says of a prompt, it says with its own errors, or from where it takes it up.
    is_of_prompt = isinstance(error, ValueError) and isinstance(error.__cause__, InputStreamError)
    if is_of_prompt or isinstance(error, VLLMClientError):
        return SpeechError(400, None, str(error))
    _logger.error("speech failed", exc_info=error)
    return SpeechError(500, None, f"speech failed: {type(error).__name__}: {error}")
