"""`bounded-kv-server`: vLLM's own server, with the flags that a model that speaks wants."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bounded_kv_server.settings import SpeechSettings
from bounded_kv_speech.package import BUILT_IN, Package

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
    command = serve_command(args, others)
    vllm = Path(sys.executable).with_name("vllm")
    os.execvp(str(vllm) if vllm.exists() else "vllm", command)


def serve_command(args: argparse.Namespace, others: Sequence[str]) -> list[str]:
    """The command line of `vllm serve`; what is in `others` comes last, and wins."""
    where = ["--host", args.host, "--port", str(args.port)]
    speech = ["--kv-plugin", "bounded", "--max-audio-streams", str(args.max_audio_streams)]
    own = [args.model] if args.model else embedded_flags(BUILT_IN, args.max_audio_streams)
    return ["vllm", "serve", *own, *where, *speech, *others]


def embedded_flags(folder: Path, max_streams: int) -> list[str]:
    """The model of a voice package, and what suits it.

    Raises:
        FileNotFoundError: the folder holds no package.
    """
    engine = Package.load(folder).engine_args(max_streams)
    return [
        str(engine.model),
        *("--served-model-name", NAME),
        *("--dtype", str(engine.dtype)),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(engine.kv_cache_memory_bytes)),
        "--enforce-eager",
    ]


if __name__ == "__main__":
    main()
