"""`python -m benchmarks talk`: the default text model tells a story, spoken as it is told.

Two servers of vLLM's, both with `--kv-plugin bounded`: one writes; its words go to the other's
socket as they come, and sound comes back in one stream. Shows when the first sound came and when
the text was whole, memory and blocks of the server that speaks, and the judge's word error rate of
the first and the last minute, and of the same sentences as the voice's teacher says them. Ends in
one JSON line; exit status 1 when the speech began after the text had ended, the stream's blocks
changed, or the server grew.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from openai import OpenAI
from tqdm import tqdm
from websockets.sync.client import ClientConnection, connect

from benchmarks.server_processes import usage
from benchmarks.soak_run import figures
from bounded_kv_server.cli import embedded_flags
from bounded_kv_speech.frames import SAMPLE_RATE
from bounded_kv_speech.package import BUILT_IN, model_of
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.recipe.teacher import BUILT_IN as TEACHERS
from bounded_kv_speech.recipe.teacher import Teacher
from vllm_bounded_kv.default_model import ensure_default_model
from vllm_bounded_kv.launch import VllmServer

QUESTION = "Tell me a very long story about a woman who walks across the country with her dog."
STORY = ["--kv-plugin", "bounded", "--bounded-kv-sink", "4", "--bounded-kv-window", "1020"]
TELLER = ["--served-model-name", "teller", "--dtype", "float32", "--max-num-seqs", "2"]
SENTENCE = re.compile(r"(?<=[.!?])\s+")
READ_EVERY_S = 5.0
MINUTE_S = 60.0
MAX_GROWTH_MB = 30.0
"""Of the server that speaks, in the second half: 150 s of sound are 7 MB as samples. Before, oneDNN
makes a kernel for each length of text that it meets."""


@dataclass
class Told:
    """What was written and what was heard."""

    sentences: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Bytes of sound at each sentence's end."""
    sound: bytearray = field(default_factory=bytearray, repr=False)
    first_sound_s: float | None = None
    text_whole_s: float = 0.0
    rss_mb: list[float] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def audio_s(self) -> float:
        """Seconds of sound."""
        return len(self.sound) / 2 / SAMPLE_RATE


def main(argv: list[str] | None = None) -> int:
    """Talk; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks talk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of speech (%(default)s)")
    parser.add_argument("--voice", default="sage", choices=sorted(TEACHERS), help="(%(default)s)")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        flags = [*STORY, *TELLER, "--max-model-len", "32768", "--enforce-eager"]
        writer = stack.enter_context(VllmServer(ensure_default_model(), flags, env))
        speaker = stack.enter_context(VllmServer(model_of(BUILT_IN), embedded_flags(BUILT_IN, 2)))
        told = _talk(writer, speaker, args.seconds, args.voice)
    result = _report(told, args.voice)
    print(json.dumps(result))
    return int(bool(result["failures"]))


def _talk(writer: VllmServer, speaker: VllmServer, seconds: float, voice: str) -> Told:
    told, start = Told(), time.monotonic()
    url = speaker.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with connect(url, max_size=None) as socket:
        socket.send(json.dumps({"type": "session.config", "voice": voice}))
        threads = [
            threading.Thread(target=_write, args=(writer.url, socket, told, start, seconds)),
            threading.Thread(target=_watch, args=(speaker, told)),
        ]
        for thread in threads:
            thread.start()
        try:
            _listen(socket, told, start, seconds)
        finally:
            told.is_over.set()
            for thread in threads:
                thread.join()
    return told


def _write(url: str, socket: ClientConnection, told: Told, start: float, seconds: float) -> None:
    """Words as they come, each sentence with an `input.done`, until there is sound enough."""
    rest = ""
    for text in _story(url):
        if told.audio_s >= seconds or told.is_over.is_set():
            break
        *whole, rest = SENTENCE.split(rest + text)
        for sentence in whole:
            told.sentences.append(sentence)
            socket.send(json.dumps({"type": "input.text", "text": sentence + " "}))
            socket.send(json.dumps({"type": "input.done"}))
        while len(told.sentences) - len(told.ends) > 40 and not told.is_over.wait(0.2):
            pass  # a minute or two ahead is enough
    told.text_whole_s = time.monotonic() - start
    if not told.is_over.is_set():
        socket.send(json.dumps({"type": "session.close"}))


def _story(url: str) -> Iterator[str]:
    """The pieces of a story without an end: vLLM's own stream, as its client sees it."""
    stream = OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create(
        model="teller",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=30_000,
        temperature=0.8,
        seed=1,
        stream=True,
        extra_body={"ignore_eos": True, "min_p": 0.05, "repetition_penalty": 1.1},
    )
    with stream:
        for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                yield text


def _listen(socket: ClientConnection, told: Told, start: float, seconds: float) -> None:
    with tqdm(total=round(seconds), unit="s of speech", file=sys.stderr) as bar:
        for message in socket:
            if isinstance(message, bytes):
                if told.first_sound_s is None:
                    told.first_sound_s = time.monotonic() - start
                told.sound += message
                bar.update(round(told.audio_s) - bar.n)
                continue
            said = json.loads(message)
            if said["type"] == "speech.done":
                told.ends.append(len(told.sound))
            elif said["type"] == "error":
                raise RuntimeError(said["error"]["message"])
            elif said["type"] == "session.closed":
                return


def _watch(speaker: VllmServer, told: Told) -> None:
    assert speaker.process is not None
    while not told.is_over.wait(READ_EVERY_S):
        used = usage(speaker.process.pid).values()
        told.rss_mb.append(sum(each.rss for each in used) / 1e6)
        told.blocks |= {stream["blocks"] for stream in figures(speaker.url)["streams"]}


def _report(told: Told, voice: str) -> dict[str, Any]:
    samples = (np.frombuffer(bytes(told.sound), "<i2") / 32768).astype(np.float32)
    cuts = [end // 2 for end in told.ends]
    judge, teacher, heard, taught = Judge(), Teacher(), [], []
    for text, begin, end in zip(
        tqdm(told.sentences, unit=" sentences", file=sys.stderr, desc="judge"),
        [0, *cuts],
        cuts,
        strict=False,
    ):
        heard.append((begin / SAMPLE_RATE, text, judge.hear(samples[begin:end])))
        said = [teacher.say(p, TEACHERS[voice], 0).samples for p in teacher.phonemes(text)]
        if said:
            taught.append((begin / SAMPLE_RATE, text, judge.hear(np.concatenate(said))))
    last = told.audio_s - MINUTE_S
    settled = told.rss_mb[len(told.rss_mb) // 2 :] or [0.0]
    growth = settled[-1] - settled[0]
    failures = []
    if told.first_sound_s is None or told.first_sound_s >= told.text_whole_s:
        failures.append("speech began after the text had ended")
    if len(told.blocks) != 1:
        failures.append(f"the stream held {sorted(told.blocks)} blocks")
    if growth > MAX_GROWTH_MB:
        failures.append(f"the server grew by {growth:.0f} MB, above {MAX_GROWTH_MB:g}")
    return {
        "audio_s": round(told.audio_s, 1),
        "sentences": len(heard),
        "first_sound_s": round(told.first_sound_s or 0, 2),
        "text_whole_s": round(told.text_whole_s, 1),
        "blocks": sorted(told.blocks),
        "rss_mb": [round(value) for value in told.rss_mb],
        "growth_mb": round(growth, 1),
        "wer": {
            name: {
                "all": _wer(pairs, 0.0, told.audio_s),
                "first_minute": _wer(pairs, 0.0, MINUTE_S),
                "last_minute": _wer(pairs, last, told.audio_s),
            }
            for name, pairs in (("system", heard), ("teacher", taught))
        },
        "failures": failures,
    }


def _wer(heard: list[tuple[float, str, str]], begin: float, end: float) -> float:
    return round(word_error_rate((t, h) for at, t, h in heard if begin <= at < end), 3)


if __name__ == "__main__":
    sys.exit(main())
