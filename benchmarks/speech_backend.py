"""Speech as a backend of `vllm bench serve`: importing this registers it as `openai-audio-speech`.

A request's prompt is the text to say. vLLM's own figures read so: TTFT is the time to the first
sound, ITL the time between parts of it, RTFx the seconds of sound in a second. What it has no
name for is kept here, and `figures` says it.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
)

from bounded_kv_server.listener import Listener

BACKEND = "openai-audio-speech"
SAMPLE_RATE, SAMPLE_BYTES = 24_000, 2
"""Of OpenAI's `pcm`."""


@dataclass
class SpeechOutput(RequestFuncOutput):
    """What vLLM knows of a request, and what its listener heard."""

    listener: Listener = field(default_factory=Listener)

    @property
    def audio_ttfp(self) -> float:
        """Seconds to the first sound (time to first packet)."""
        return self.ttft

    @property
    def audio_rtf(self) -> float:
        """Seconds of the whole request by seconds of its sound."""
        return self.latency / self.listener.audio_s


HEARD: list[SpeechOutput] = []
"""Every request of the run but vLLM's trial and its warm-ups, in the order that they ended."""


async def async_request_openai_audio_speech(
    request_func_input: RequestFuncInput,
    session: aiohttp.ClientSession,
    pbar: Any = None,
) -> SpeechOutput:
    """Ask for speech as PCM and listen to it as it comes."""
    output = SpeechOutput(prompt_len=request_func_input.prompt_len)
    body = {
        "model": request_func_input.model_name or request_func_input.model,
        "input": request_func_input.prompt,
        "response_format": "pcm",
        **(request_func_input.extra_body or {}),
    }
    headers = dict(request_func_input.extra_headers or {})
    output.start_time = time.perf_counter()
    try:
        async with session.post(request_func_input.api_url, json=body, headers=headers) as response:
            if response.status == 200:
                await _listen(response, output)
            else:
                output.error = f"HTTP {response.status}: {(await response.text())[:300]}"
    except (aiohttp.ClientError, OSError):
        output.error = "".join(traceback.format_exception(*sys.exc_info()))
    if not output.error and not output.listener.audio_s:
        output.error = "no sound came"
    output.success = not output.error
    if request_func_input.request_id is not None:  # a trial has none
        HEARD.append(output)
    if pbar is not None:
        pbar.update(1)
    return output


async def _listen(response: aiohttp.ClientResponse, output: SpeechOutput) -> None:
    last = 0.0
    async for part in response.content.iter_any():
        now = time.perf_counter() - output.start_time
        output.listener.receive(now, len(part) / SAMPLE_BYTES / SAMPLE_RATE)
        if last:
            output.itl.append(now - last)
        else:
            output.ttft = now
        last = now
    output.latency = last
    output.output_tokens = len(output.itl) + 1  # parts of sound
    output.input_audio_duration = output.listener.audio_s  # for vLLM's RTFx


def figures(outputs: Sequence[SpeechOutput], max_ttfp_s: float) -> dict[str, Any]:
    """The metrics of speech over a run, whose requests succeeded or failed.

    Goodput counts requests whose first sound came within `max_ttfp_s` and that had no underrun.
    """
    well = [output for output in outputs if output.success]
    if not well:
        return {"completed": 0, "failed": len(outputs)}
    start = min(output.start_time for output in well)
    took = max(output.start_time + output.latency for output in well) - start
    audio = sum(output.listener.audio_s for output in well)
    silence = sum(output.listener.silence_s for output in well)
    good = [o for o in well if o.audio_ttfp <= max_ttfp_s and not o.listener.underruns]
    return {
        "completed": len(well),
        "failed": len(outputs) - len(well),
        "audio_ttfp_ms": _percentiles([output.audio_ttfp * 1e3 for output in well]),
        "audio_rtf": _percentiles([output.audio_rtf for output in well]),
        "audio_duration_s": round(audio, 2),
        "audio_s_per_s": round(audio / took, 3),
        "underruns_per_request": round(sum(o.listener.underruns for o in well) / len(well), 3),
        "without_underrun": round(sum(not o.listener.underruns for o in well) / len(well), 3),
        "continuity": round(audio / (audio + silence), 4),
        "goodput_per_s": round(len(good) / took, 3),
        "goodput_max_ttfp_ms": max_ttfp_s * 1e3,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    shares = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: round(float(np.quantile(values, q)), 3) for name, q in shares.items()}


ASYNC_REQUEST_FUNCS[BACKEND] = async_request_openai_audio_speech
