"""A chat that outgrows the model's trained length, its whole history sent with every turn.

    make serve ARGS="--bounded-kv-window 508 --max-model-len 100000 --enforce-eager"
    .venv/bin/python examples/long_chat.py

Stock vLLM ends such a chat at the model's length. Here each turn reads the history through the
window, in the same number of blocks.
"""

from __future__ import annotations

import argparse
import time
from pydoc_data.topics import topics
from typing import Any

import httpx
from openai import OpenAI


def main() -> None:
    """Chat, and show how long the history is by now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key="none", timeout=600)
    model = client.models.list().data[0].id
    shown = httpx.get(f"{args.url}/v1/bounded_kv", timeout=60).json()
    print(f"{model}: a slot is {shown['slot_blocks']} blocks of {shown['block_size']} tokens\n")
    messages: list[Any] = []
    print("turn   history tokens   seconds   answer")
    for turn, topic in zip(range(args.turns), topics.values(), strict=False):
        question = f"{topic[:800]}\n\nIn one sentence, what is this about?"
        messages.append({"role": "user", "content": question})
        start = time.perf_counter()
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=args.max_tokens, temperature=0
        )
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        assert answer.usage is not None
        print(
            f"{turn + 1:>4}   {answer.usage.prompt_tokens:>14,}   "
            f"{time.perf_counter() - start:>7.1f}   {' '.join(said.split())[:60]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
