"""What failures come to."""

from __future__ import annotations

import logging

import pytest
import torch
from vllm.exceptions import QueueOverflowError, VLLMValidationError
from vllm.v1.engine.async_llm import InputStreamError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from bounded_kv_server.errors import as_status
from bounded_kv_speech.turns import StreamAborted, StreamFull, TooManyStreams


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError(), 503),
        (QueueOverflowError(), 503),
        (TooManyStreams("16 are open, of max_streams 16"), 503),
        (StreamAborted("the engine ends"), 503),
        (torch.OutOfMemoryError("CUDA out of memory"), 503),
        (caused(EngineGenerateError(), QueueOverflowError()), 503),
        (VLLMValidationError("the prompt is too long"), 400),
        (caused(EngineGenerateError(), VLLMValidationError("the prompt is too long")), 400),
        (caused(ValueError("a bad token"), InputStreamError(ValueError("a bad token"))), 400),
        (StreamFull("as long as one may be"), 413),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_each_has_its_status(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    found = as_status(error)
    assert found.status == status
    assert (found.retry_after_s is not None) == (status == 503)
    assert not caplog.records


@pytest.mark.parametrize("error", [ValueError("of ours"), RuntimeError("of nobody")])
def test_what_nobody_foresaw_is_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert as_status(error).status == 500
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None and record.exc_info[1] is error
