"""Speech as a backend of `vllm bench serve`, against a server that streams silence and pauses."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

from benchmarks import speech_backend, vllm_bench

TENTH = bytes(2 * 2400)
"""0.1 s of silence."""


async def _speak(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    assert body["response_format"] == "pcm" and body["voice"] == "sage"
    if body["input"] == "full":
        return web.json_response({"error": {"message": "busy"}}, status=503)
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(TENTH)
    await asyncio.sleep(0.5 if body["input"] == "slow" else 0)
    await response.write(TENTH)
    return response


async def _heard(texts: list[str]) -> list[speech_backend.SpeechOutput]:
    app = web.Application()
    app.router.add_post("/v1/audio/speech", _speak)
    outputs = []
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        for i, text in enumerate(texts):
            asked = RequestFuncInput(
                prompt=text,
                api_url=str(server.make_url("/v1/audio/speech")),
                prompt_len=1,
                output_len=1,
                model="bounded-voice",
                extra_body={"voice": "sage"},
                request_id=f"r{i}" if i else None,
            )
            function = ASYNC_REQUEST_FUNCS[speech_backend.BACKEND]
            outputs.append(await function(asked, http))
    return outputs


def test_a_run_has_the_metrics_of_speech() -> None:
    speech_backend.HEARD.clear()
    trial, fast, slow, full = asyncio.run(_heard(["fast", "fast", "slow", "full"]))
    assert [fast, slow, full] == speech_backend.HEARD and trial.success
    assert fast.success and fast.listener.audio_s == pytest.approx(0.2)
    assert fast.input_audio_duration == pytest.approx(0.2)  # vLLM's RTFx
    assert not full.success and "HTTP 503" in full.error and "busy" in full.error
    found = speech_backend.figures(speech_backend.HEARD, max_ttfp_s=0.4)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["audio_duration_s"] == 0.4
    # 0.1 s of sound and a start buffer of 0.1 s; then 0.5 s without any.
    assert slow.listener.underruns == 1 and found["without_underrun"] == 0.5
    assert found["continuity"] == pytest.approx(0.4 / 0.7, abs=0.1)
    assert slow.audio_rtf > 2 > fast.audio_rtf
    assert found["goodput_per_s"] > 0


def test_nothing_heard_is_said() -> None:
    assert speech_backend.figures([], 0.5) == {"completed": 0, "failed": 0}


def test_the_limit_is_that_of_goodput() -> None:
    assert vllm_bench._max_ttfp_s(["ttft:250", "e2el:9000"]) == 0.25
    assert vllm_bench._max_ttfp_s(None) == vllm_bench.MAX_TTFP_S
