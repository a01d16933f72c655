"""`python -m benchmarks COMMAND ...`: every benchmark by its name; each ends in one JSON line.

Without a command, or with options alone: `ratios`.
"""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "serve": ("serve.run", "servers side by side: stock vLLM, a sliding window, transformers"),
    "ratios": ("ratios", "engines in turns: stock vLLM and the plugin, as ratios"),
    "kernels": ("kernels", "the slot pool's attention against dense SDPA, and planning"),
    "quality": ("quality.__main__", "perplexity of long real text, by how the stream is kept"),
    "speech": ("speech", "the speech server under load, as its listeners hear it"),
    "talk": ("talk", "a text model's story, spoken over the socket while it is told"),
    "voice": ("voice.__main__", "how well the embedded voice speaks"),
    "soak": ("soak", "one stream of a million tokens beside short ones"),
    "vllm-bench": ("vllm_bench", "`vllm bench serve`, with speech as one more backend"),
}
"""Module, and what it is, by name."""
DEFAULT = "ratios"


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; returns its exit status."""
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if not args or args[0].startswith("-"):
        args = [DEFAULT, *args]
    name, *rest = args
    if name not in COMMANDS:
        print(f"{name!r} is no benchmark\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[name]
    status: int = import_module(f"benchmarks.{module}").main(rest)
    return status


def _usage() -> str:
    lines = [f"  {name:12}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m benchmarks COMMAND ... (COMMAND --help)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
