"""`bounded-kv-server`: vLLM's own server, with the flags that a model that speaks wants."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from bounded_kv_server.settings import SpeechSettings
from bounded_kv_speech.package import BUILT_IN, engine_args, model_of
from vllm_bounded_kv.launch import vllm_command

NAME = "bounded-voice"


def main(argv: Sequence[str] | None = None) -> None:
    """Become `vllm serve`."""
    parser = argparse.ArgumentParser(
        prog="bounded-kv-server",
        allow_abbrev=False,
        description="Serve speech. All further flags are vLLM's and the plugin's: see "
        "`vllm serve --help=all`.",
    )
    parser.add_argument("--model", help="folder or hub name (default: the embedded voice)")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    parser.add_argument(
        "--max-audio-streams",
        type=int,
        default=SpeechSettings().max_audio_streams,
        help="streams that sound at once (%(default)s)",
    )
    args, others = parser.parse_known_args(argv)
    if not args.model:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # more wait for each other
    os.execvp(vllm_command(), serve_command(args, others))


def serve_command(args: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """The command line of `vllm serve`; what is in `others` comes last, and wins."""
    where = ["--host", args.host, "--port", str(args.port)]
    most = args.max_audio_streams
    own = (
        [args.model, *_plugin_flags(most)]
        if args.model
        else [str(model_of(BUILT_IN)), *embedded_flags(BUILT_IN, most)]
    )
    return ["vllm", "serve", *own, *where, *others]


def _plugin_flags(max_streams: int) -> list[str]:
    return ["--kv-plugin", "bounded", "--max-audio-streams", str(max_streams)]


def embedded_flags(folder: Path, max_streams: int) -> list[str]:
    """What suits the model of a voice package.

    Raises:
        FileNotFoundError: the folder holds no package.
    """
    engine = engine_args(folder, max_streams)
    return [
        *_plugin_flags(max_streams),
        *("--served-model-name", NAME),
        *("--dtype", str(engine.dtype)),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(engine.kv_cache_memory_bytes)),
        *("--distributed-executor-backend", str(engine.distributed_executor_backend)),
        "--enforce-eager",
    ]


if __name__ == "__main__":
    main()
