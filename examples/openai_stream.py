"""Stream from a running server with the stock `openai` client: `python examples/openai_stream.py`.

Start the server first: `make serve ARGS="--bounded-kv-window 252 --bounded-kv-max-source-len 512"`.
Two requests share a system prompt as their source: it is kept whole, whatever they go on to say,
and held once.
"""

import argparse
import sys

import httpx
from openai import OpenAI

SYSTEM = "You are a patient guide who answers in plain words and short sentences. " * 8


def main() -> None:
    """Stream two answers over one source, then show the server's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=120)
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    source_len = num_tokens(args.url, model)
    for question in ("Why is the sky blue?", "How do boats float?"):
        print(f"> {question}")
        stream = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ],
            max_tokens=args.max_tokens,
            temperature=0.7,
            stream=True,
            extra_body={"vllm_xargs": {"kv_source_len": source_len}},
        )
        for chunk in stream:
            sys.stdout.write((chunk.choices[0].delta.content or "") if chunk.choices else "")
            sys.stdout.flush()
        print("\n")
    figures = httpx.get(f"{args.url}/v1/bounded_kv").json()
    print({k: v for k, v in figures.items() if k not in ("policy", "streams")})


def num_tokens(url: str, model: str) -> int:
    """Tokens of the shared beginning: what two chats with this system prompt have in common."""
    tokens = [
        httpx.post(
            f"{url}/tokenize",
            json={
                "model": model,
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": question},
                ],
            },
        ).json()["tokens"]
        for question in ("a", "b")
    ]
    return next(i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b)


if __name__ == "__main__":
    main()
