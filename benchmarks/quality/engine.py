"""Log-probabilities of a text through vLLM itself: one long prompt, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.geometry import kv_bytes_per_token, max_positions
from benchmarks.quality.schemes import FULL, REBASE, WINDOW, Scheme

CHUNK = 512
"""Tokens a step. vLLM holds a few copies of the chunk's logits in float32, 100 MB each at a
vocabulary of 49,152."""


def engine_options(scheme: Scheme, model: str, num_tokens: int) -> dict[str, Any]:
    """What `vllm.LLM` needs to read `num_tokens` by this scheme.

    Schemes whose positions grow with the stream get a table of as many, beyond what the model was
    trained on. Without a sink only distances inside the window count, so window only needs none.
    """
    length = num_tokens + 1  # vLLM generates one token after the prompt
    entries = length if scheme.kind == FULL else scheme.sink + scheme.window
    options: dict[str, Any] = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": length,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": kv_bytes_per_token(model) * (entries + 1024),
        "disable_log_stats": True,
        "seed": 0,
    }
    falls_back = scheme.kind in (REBASE, WINDOW)
    if not falls_back and length > max_positions(model):
        options["hf_overrides"] = {"max_position_embeddings": length}
    if scheme.kind != FULL:
        settings: dict[str, Any] = {"sink": scheme.sink, "window": scheme.window}
        settings["positions"] = "rebase" if falls_back else "absolute"
        if scheme.limit is not None:
            settings["position_limit"] = scheme.limit
        options["additional_config"] = {"kv_plugin": "bounded", "bounded_kv": settings}
    return options


def score(
    options: dict[str, Any],
    tokens: Sequence[int],
    on_progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """Negative log-likelihood of every token but the first, by an engine in this process.

    Args:
        options: of `vllm.LLM`. The engine is built here and ended here.
        tokens: `n` ids, at least two; `n + 1` must fit in `max_model_len`.
        on_progress: called after each step with the number of tokens read so far.

    Returns:
        `[n - 1]` in nats.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(**options).llm_engine
    core: Any = engine.engine_core  # in this process
    try:
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            prompt_logprobs=0,  # of the prompt's own tokens only
            flat_logprobs=True,  # four lists instead of a dictionary a token
            detokenize=False,
        )
        engine.add_request("text", {"prompt_token_ids": list(tokens)}, params)
        (request,) = core.engine_core.scheduler.requests.values()
        answers: list[Any] = []
        while engine.has_unfinished_requests():
            answers += engine.step()
            if on_progress is not None:
                on_progress(min(request.num_computed_tokens, len(tokens) - 1))
        return -_own(answers[-1].prompt_logprobs, tokens)
    finally:
        core.shutdown()


def _own(logprobs: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """`[n - 1]` log-probabilities of the tokens, from vLLM's `FlatLogprobs` of `n` positions."""
    if list(logprobs.token_ids) != list(tokens[1:]):
        raise RuntimeError("vLLM's prompt_logprobs are not those of the prompt's own tokens")
    return np.array(logprobs.logprobs, dtype=np.float32)
