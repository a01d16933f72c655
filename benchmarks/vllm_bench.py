"""`python -m benchmarks vllm-bench ...`: `vllm bench serve ...` with speech as one more backend.

All options are vLLM's own. With `--backend openai-audio-speech` and no dataset, requests say the
sentences of the voice's evaluation, and the run ends in one JSON line of what listeners heard.
`--goodput ttft:MS` is then the limit of the first sound (500 ms without it).
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.voice.texts import sentences

EACH = 2
"""Sentences of a request."""
MAX_TTFP_S = 0.5
SPEECH_DEFAULTS = {
    "--endpoint": "/v1/audio/speech",
    "--model": "bounded-voice",
    "--dataset-name": "custom",
}


def main(argv: list[str] | None = None) -> int:
    """Run vLLM's benchmark; returns the exit status."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from benchmarks import speech_backend  # registers

    words = list(sys.argv[2:] if argv is None else argv)
    is_speech = speech_backend.BACKEND in words
    parser = FlexibleArgumentParser(prog="python -m benchmarks vllm-bench")
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        if is_speech:
            _use_our_sentences(words, Path(folder))
        args = parser.parse_args(words)
        speech_backend.HEARD.clear()
        serve(args)
    if not is_speech:
        return 0
    found = speech_backend.figures(speech_backend.HEARD, _max_ttfp_s(args.goodput))
    print(json.dumps(found))
    return int(not found["completed"] or found["failed"] > 0)


def _use_our_sentences(words: list[str], folder: Path) -> None:
    """Add what speech needs and the caller has not said."""
    is_ours = not _has(words, "--dataset-name")
    for option, value in SPEECH_DEFAULTS.items():
        if not _has(words, option):
            words += [option, value]
    if not is_ours:
        return
    path = folder / "sentences.jsonl"
    lines = sentences()
    pairs = [" ".join(lines[i : i + EACH]) for i in range(0, len(lines), EACH)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in pairs))
    words += ["--dataset-path", str(path), "--skip-tokenizer-init"]
    _require_pandas()


def _has(words: Sequence[str], option: str) -> bool:
    return any(word == option or word.startswith(f"{option}=") for word in words)


def _require_pandas() -> None:
    from importlib.util import find_spec

    if find_spec("pandas") is None:
        raise SystemExit("vLLM's `custom` dataset needs pandas: pip install pandas==3.1.1")


def _max_ttfp_s(goodput: Any) -> float:
    """The limit that `--goodput ttft:MS` sets."""
    found = re.search(r"ttft:([0-9.]+)", " ".join(goodput or ()))
    return float(found[1]) / 1e3 if found else MAX_TTFP_S


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
