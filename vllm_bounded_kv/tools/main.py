"""The command `bounded-kv`.

Neither vLLM nor torch is imported before a subcommand wants it: `doctor` must run without them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from vllm_bounded_kv.tools import doctor, size


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="bounded-kv",
        description="Tools for bounded KV caches. None loads a model or starts an engine.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    size.add_command(commands)
    doctor.add_command(commands)
    args = parser.parse_args(argv)
    os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "ERROR"
    )  # what vLLM says of its set-up is no answer
    run: int = args.run(args)
    return run
