"""One scheme in a process of its own: engines of one process share what vLLM keeps globally."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.schemes import STREAMING, Scheme


def run(
    scheme: Scheme, model: str, tokens: Sequence[int], folder: Path
) -> tuple[NDArray[np.float32], float]:
    """Score a text in a new process, with a progress bar on stderr.

    Args:
        scheme: what to run.
        model: folder.
        tokens: `n` ids.
        folder: for the reference's checkpoint; the engine has none, and begins anew.

    Returns:
        `[n - 1]` in nats, and the seconds it took, start-up included.
    """
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
        nats = pool.submit(_score, scheme, model, list(tokens), folder).result()
    return nats, time.perf_counter() - start


def end_with_parent() -> None:
    """Let this process end when the one that started it does, in whatever way that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _score(scheme: Scheme, model: str, tokens: list[int], folder: Path) -> NDArray[np.float32]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    from tqdm import tqdm

    try:
        scorer = _scorer(scheme, model, len(tokens), folder)
        with tqdm(total=len(tokens) - 1, desc=str(scheme), unit="tok", file=sys.stderr) as bar:
            return scorer(tokens, lambda done: bar.update(done - bar.n))
    except Exception as error:  # not every exception of an engine travels between processes
        raise RuntimeError(f"{scheme}: {type(error).__name__}: {error}") from None


def _scorer(
    scheme: Scheme, model: str, num_tokens: int, folder: Path
) -> Callable[..., NDArray[np.float32]]:
    if scheme.kind == STREAMING:
        import torch

        from benchmarks.quality.checkpoint import Checkpoint
        from benchmarks.quality.streaming_llm import StreamingLlama

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        reference = StreamingLlama.from_folder(model)

        def by_reference(tokens: list[int], on_progress: Any) -> NDArray[np.float32]:
            sizes = scheme.sink, scheme.window
            path = folder / f"{scheme.kind}-{scheme.sink}-{scheme.window}.pt"
            checkpoint = Checkpoint.of(path, tokens, sizes, os.path.abspath(model))
            nats = reference.score(tokens, *sizes, on_progress=on_progress, checkpoint=checkpoint)
            checkpoint.remove()
            return nats.numpy()

        return by_reference
    from benchmarks.quality.engine import engine_options, score

    options = engine_options(scheme, model, num_tokens)
    return lambda tokens, on_progress: score(options, tokens, on_progress)
