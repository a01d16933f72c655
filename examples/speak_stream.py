"""Speak a chat's answer while it is written: one model's text into another's voice.

    python examples/speak_stream.py "Tell me a story." --text http://127.0.0.1:8001/v1 -o story.wav

`--text` is any OpenAI-compatible chat server (`make serve PORT=8001`), `--speech` the speech server
(`bounded-kv-server`). Words go to its socket as they come; sound is written as it comes.
"""

import argparse
import json
import sys
import threading
import time
import wave

from openai import OpenAI
from websockets.sync.client import ClientConnection, connect


def main() -> None:
    """Ask, and speak what comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--text", default="http://127.0.0.1:8001/v1", help="(%(default)s)")
    parser.add_argument("--speech", default="ws://127.0.0.1:8000", help="(%(default)s)")
    parser.add_argument("--voice", default="heart", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="(%(default)s)")
    parser.add_argument("-o", "--out", default="answer.wav", help="(%(default)s)")
    args = parser.parse_args()
    with connect(f"{args.speech}/v1/audio/speech/stream") as socket:
        socket.send(json.dumps({"type": "session.config", "voice": args.voice}))
        ready = json.loads(socket.recv())
        if ready["type"] != "session.ready":
            sys.exit(ready["error"]["message"])
        writer = threading.Thread(target=write, args=(socket, args))
        start = time.monotonic()
        writer.start()
        listen(socket, args.out, ready["rate"], start)
        writer.join()


def write(socket: ClientConnection, args: argparse.Namespace) -> None:
    """Send the answer's words as they come."""
    client = OpenAI(base_url=args.text, api_key="none")
    start = time.monotonic()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.question}],
        max_tokens=args.max_tokens,
        stream=True,
    )
    for chunk in answer:
        if chunk.choices and (text := chunk.choices[0].delta.content):
            print(text, end="", flush=True)
            socket.send(json.dumps({"type": "input.text", "text": text}))
    print(f"\n[the text was whole after {time.monotonic() - start:.1f} s]", file=sys.stderr)
    socket.send(json.dumps({"type": "session.close"}))


def listen(socket: ClientConnection, path: str, rate: int, start: float) -> None:
    """Write the sound as it comes."""
    with wave.open(path, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        for message in socket:
            if isinstance(message, bytes):
                if not file.tell():
                    print(
                        f"\n[first sound after {time.monotonic() - start:.1f} s]", file=sys.stderr
                    )
                file.writeframes(message)
                continue
            told = json.loads(message)
            if told["type"] == "error":
                sys.exit(told["error"]["message"])
            if told["type"] == "session.closed":
                return


if __name__ == "__main__":
    main()
