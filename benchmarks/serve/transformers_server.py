"""Hugging Face transformers over a cropped cache, behind what is measured of `/v1/completions`.

Batch one: requests wait for each other. The cache is a `DynamicCache` of which, after every chunk
of the prompt and every token, the first `sink` entries and the last `window` stay; a query sees the
chunk it came with as well. Positions are those of the stream and keys keep theirs, so beyond the
model's trained length it runs on, but what it says is the model's no more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, DynamicCache

CHUNK = 512
"""Tokens of a prompt that are read at once."""
CACHE_METRIC = "transformers_cache_bytes"


class Request(BaseModel):
    """What of OpenAI's completion request is honoured; the rest is ignored."""

    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)


class CroppedStream:
    """One greedy stream over a cache that is cropped as it goes."""

    def __init__(self, model: Any, sink: int, window: int) -> None:
        self._model = model
        self._sink, self._window = sink, window
        self._position = 0
        self.cache: Any = DynamicCache(config=model.config)

    @torch.inference_mode()
    def step(self, ids: list[int]) -> int:
        """Read so many tokens; returns the next one."""
        positions = torch.arange(self._position, self._position + len(ids))[None]
        output = self._model(
            input_ids=torch.tensor([ids]),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._position += len(ids)
        self._crop()
        return int(output.logits[0, -1].argmax())

    def _crop(self) -> None:
        if self.cache.get_seq_length() <= self._sink + self._window:
            return
        for layer in self.cache.layers:
            layer.keys = self._cropped(layer.keys)
            layer.values = self._cropped(layer.values)

    def _cropped(self, states: torch.Tensor) -> torch.Tensor:
        """The first and the last entries of `[1, H, T, D]`."""
        kept = [states[..., : self._sink, :], states[..., -self._window :, :]]
        return torch.cat(kept, dim=-2)

    @property
    def num_bytes(self) -> int:
        """Of the keys and values held."""
        held = [states for layer in self.cache.layers for states in (layer.keys, layer.values)]
        return sum(int(states.nbytes) for states in held)


def application(model: Any, sink: int, window: int) -> FastAPI:
    """The server of a model."""
    app = FastAPI()
    turn = asyncio.Lock()
    one_thread = ThreadPoolExecutor(1)  # the same one for every step, with its OpenMP threads
    held = {"bytes": 0}

    @app.get("/health")
    async def health() -> None:
        """It is there."""

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(f"{CACHE_METRIC} {held['bytes']}\n")

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        run = asyncio.get_running_loop().run_in_executor

        async def events() -> AsyncIterator[str]:
            async with turn:
                stream = CroppedStream(model, sink, window)
                *chunks, last = [
                    request.prompt[i : i + CHUNK] for i in range(0, len(request.prompt), CHUNK)
                ]
                for chunk in chunks:
                    await run(one_thread, stream.step, chunk)
                for left in reversed(range(request.max_tokens)):
                    token = await run(one_thread, stream.step, last)
                    held["bytes"] = stream.num_bytes
                    reason = None if left else "length"
                    choice = {"text": "", "token_ids": [token], "finish_reason": reason}
                    yield f"data: {json.dumps({'choices': [choice]})}\n\n"
                    last = [token]
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def main(argv: list[str] | None = None) -> int:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sink", type=int, required=True)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    app = application(model.eval(), args.sink, args.window)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
