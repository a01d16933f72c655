"""A voice package: a folder with the language model, the codec and the voices that come with it.

lm/                 what vLLM serves
codec.safetensors   encoder and decoder, half precision
voices.safetensors  codes of each voice, int16
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.engine.arg_utils import AsyncEngineArgs

from bounded_kv_speech.codec import Codec, CodecConfig
from bounded_kv_speech.lm import HEAD_DIM, KV_HEADS, LAYERS, SINK, WINDOW, export
from bounded_kv_speech.voice import source_of

BUILT_IN = Path(__file__).parent / "weights"
_STREAM_TOKENS = 1_000_000
"""Of the engine's longest stream: five hours."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The engine core runs the model itself. On CPUs vLLM gives it a process of its own, and both spin
while they wait for each other (vLLM 0.32: `platforms/cpu.py`, `shm_broadcast.py`): one stream on
one core takes a quarter more time, of a model this small. The short name, `uni`, vLLM turns down.
"""


@dataclass(frozen=True)
class Package:
    """Everything that speaking needs, loaded; `lm` is left to vLLM."""

    folder: Path
    codec: Codec
    voices: Mapping[str, list[int]]
    """Tokens of each voice, `VOICE` first: what a stream has as its source."""

    @classmethod
    def load(cls, folder: Path = BUILT_IN) -> Package:
        """Load the folder's codec and voices.

        Raises:
            FileNotFoundError: when something is not there.
        """
        check(folder)
        codec = Codec(CodecConfig())
        codec.load_state_dict(load_file(folder / "codec.safetensors"))
        codec.eval().requires_grad_(False)
        voices = {
            name: source_of(codes.long().numpy())
            for name, codes in load_file(folder / "voices.safetensors").items()
        }
        return cls(folder, codec, voices)

    def engine_args(self, max_streams: int, compiled: bool = False) -> AsyncEngineArgs:
        """See the function."""
        return engine_args(self.folder, max_streams, compiled)


def check(folder: Path) -> None:
    """See that everything is there.

    Raises:
        FileNotFoundError: when something is not.
    """
    for part in ("lm/config.json", "codec.safetensors", "voices.safetensors"):
        if not (folder / part).exists():
            raise FileNotFoundError(f"{folder} is no voice package: it has no {part}")


def model_of(folder: Path) -> Path:
    """What vLLM serves of a package."""
    return folder / "lm"


def engine_args(folder: Path, max_streams: int, compiled: bool = False) -> AsyncEngineArgs:
    """An engine of vLLM's for up to `max_streams` streams of a package at a time. Its threads are
    those of this process's environment (`OMP_NUM_THREADS`): a model this small wants one.

    `compiled`: by vLLM, which takes a minute at the first start, and half of one at others.

    Raises:
        FileNotFoundError: when the folder is no package.
    """
    check(folder)
    entry = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4  # keys and values in float32
    room = (max_streams + 2) * (2 * SINK + WINDOW) + 1024
    return AsyncEngineArgs(
        model=str(model_of(folder)),
        dtype="float32",
        enforce_eager=not compiled,
        max_model_len=_STREAM_TOKENS,
        max_num_seqs=max_streams,
        kv_cache_memory_bytes=room * entry,
        distributed_executor_backend=ONE_PROCESS,
        logits_processors=["bounded_kv_speech.order:PhoneOrder"],
        additional_config={"kv_plugin": "bounded"},
    )


def save(
    folder: Path,
    lm: Mapping[str, Tensor],
    codec: Codec,
    voices: Mapping[str, NDArray[np.int64]],
) -> None:
    """Write a package; `voices` are codes."""
    folder.mkdir(parents=True, exist_ok=True)
    export(folder / "lm", dict(lm))
    weights = {key: value.half().contiguous() for key, value in codec.state_dict().items()}
    save_file(weights, folder / "codec.safetensors")
    save_voices(folder, voices)


def save_voices(folder: Path, voices: Mapping[str, NDArray[np.int64]]) -> None:
    """Write a package's voices, as codes, in place of those it has."""
    short = {name: torch.from_numpy(codes.astype(np.int16)) for name, codes in voices.items()}
    save_file(short, folder / "voices.safetensors")


def write_sums(folder: Path) -> None:
    """Write a package's `SHA256SUMS`."""
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}"
        for path in sorted(folder.rglob("*.safetensors"))
    ]
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
