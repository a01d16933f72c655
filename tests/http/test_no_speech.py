"""A model that makes text says why it does not speak."""

from __future__ import annotations

import httpx

from support.server import figures
from vllm_bounded_kv.launch import VllmServer


def test_the_default_text_model_says_why_it_does_not_speak(shared_server: VllmServer) -> None:
    answer = httpx.post(f"{shared_server.url}/v1/audio/speech", json={"input": "Hello."})
    assert answer.status_code == 404
    assert "no speech profile" in answer.json()["error"]["message"]
    assert figures(shared_server.url)["slots_used"] == 0
