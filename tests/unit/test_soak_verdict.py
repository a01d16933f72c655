"""The soak's verdict on made-up series, each of its faults noticed, and its command line."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import soak
from benchmarks.soak_verdict import (
    Arrivals,
    Limits,
    Reading,
    Spread,
    Verdict,
    growth,
    judge,
    parts,
    slope,
)
from benchmarks.sse import Completion, StreamError
from benchmarks.tiny_llama import VOCAB_SIZE, TinyLlama, random_prompt, tiny_tokenizer, tiny_weights

TOKENS, NUM_READINGS, SLOTS, BLOCKS = 100_000, 200, 16, 8
LIMITS = Limits(slots=SLOTS)


def readings(api: float = 50.0, worker: float = 100.0, noise: int = 200_000) -> list[Reading]:
    """Of a server whose processes grow by so many bytes a token, after a warm-up of 50 MB."""
    rng = random.Random(0)
    result = []
    for i in range(NUM_READINGS):
        tokens = 1 + i * TOKENS // NUM_READINGS
        warming = min(tokens / (0.08 * TOKENS), 1) * 50e6
        rss = {
            "API server 1": int(600e6 + api * tokens + rng.uniform(-noise, noise)),
            "worker 2": int(700e6 + warming + worker * tokens + rng.uniform(-noise, noise)),
        }
        cpu_s = {"worker 2": tokens * 5e-3 + max(tokens - TOKENS / 2, 0) * 2e-3}
        result.append(Reading(tokens, BLOCKS, rng.choice([SLOTS - 1, SLOTS]), rss, cpu_s))
    return result


def arrivals(growth: float = 0.0, itl_ms: float = 10.0) -> Arrivals:
    """Tokens whose latency grows by the share `growth` over the stream, with noise and lumps."""
    rng = np.random.default_rng(0)
    counts = np.tile([1, 1, 1, 2, 5], TOKENS // 10)
    at = np.cumsum(counts) / counts.sum()
    gaps = counts * itl_ms * (1 + growth * at) * rng.lognormal(0, 0.1, len(counts))
    return Arrivals(list(np.cumsum(gaps) / 1e3), [int(c) for c in counts])


def verdict_on(
    read: list[Reading] | None = None,
    arrived: Arrivals | None = None,
    leftover: int = 0,
    limits: Limits = LIMITS,
) -> Verdict:
    return judge(read or readings(), arrived or arrivals(), leftover, limits)


def the_failure(verdict: Verdict) -> str:
    (failure,) = verdict.failures
    return failure


def test_slope_of_a_line() -> None:
    assert slope([0, 10, 20], [5, 25, 45]) == pytest.approx(2.0)


def test_growth_of_each_process_and_of_all() -> None:
    late = [r for r in readings(noise=0) if r.tokens > TOKENS / 10]
    total, each = growth(late)
    assert each == pytest.approx({"API server 1": 50, "worker 2": 100}, abs=0.01)
    assert total == pytest.approx(150, abs=0.01)


def test_a_process_that_comes_late_counts() -> None:
    late = [replace(r, rss={**r.rss, "new 3": 10**8}) for r in readings()[100:]]
    assert "bytes a token" in the_failure(verdict_on([*readings()[:100], *late]))


def test_tenths() -> None:
    assert [len(p) for p in parts(np.arange(103.0))] == [11, 11, 11] + [10] * 7
    assert [p[0] for p in parts(np.arange(100.0))] == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_tokens_of_one_piece_share_its_gap() -> None:
    arrived = Arrivals([1.0, 1.03, 1.04], [5, 3, 1])
    assert arrived.itl_ms() == pytest.approx([10, 10, 10, 10])


def test_processor_time_and_memory_of_each_tenth() -> None:
    verdict = verdict_on(readings(noise=0))
    assert verdict.cpu_ms_per_token == {"worker 2": pytest.approx([5.0] * 5 + [7.0] * 5, abs=0.02)}
    assert list(verdict.rss_mb) == ["API server 1", "worker 2", "all"]
    assert verdict.rss_mb["API server 1"] == pytest.approx(
        [600 + i / 2 for i in range(11)], abs=0.1
    )


def test_spread() -> None:
    assert Spread.of(np.arange(1.0, 6.0)) == Spread(3.0, (2.0, 4.0))


def test_a_sound_server_passes() -> None:
    verdict = verdict_on()
    assert verdict.failures == []
    assert verdict.blocks == [BLOCKS]
    assert verdict.max_slots_used == SLOTS
    assert verdict.bytes_per_token == pytest.approx(150, abs=2)
    assert verdict.itl_ratio == pytest.approx(1, abs=0.01)
    assert len(verdict.itl_ms) == 10


# --- every fault is noticed, alone


def test_a_leak_is_noticed() -> None:
    assert "grew by 2" in the_failure(verdict_on(readings(api=50 + 60)))
    assert verdict_on(readings(api=50 + 40)).failures == []


def test_a_leak_in_steps_is_noticed() -> None:
    """As pools grow: 2 MB every 20,000 tokens."""
    read = [
        replace(r, rss={**r.rss, "worker 2": r.rss["worker 2"] + r.tokens // 20_000 * 2_000_000})
        for r in readings()
    ]
    assert "bytes a token" in the_failure(verdict_on(read))


def test_noise_of_a_short_run_is_allowed_for_and_no_more() -> None:
    limits = replace(LIMITS, noise_bytes=5_000_000)  # 50 bytes a token of this stream
    assert verdict_on(readings(api=50 + 90), limits=limits).failures == []
    assert "above 250.0" in the_failure(verdict_on(readings(api=50 + 110), limits=limits))


def test_a_warm_up_is_no_leak() -> None:
    first, last = readings()[0].rss, readings()[-1].rss
    assert (sum(last.values()) - sum(first.values())) / TOKENS > 200


def test_a_block_more_is_noticed() -> None:
    read = readings()
    read[120] = replace(read[120], blocks=BLOCKS + 1)
    assert f"held [{BLOCKS}, {BLOCKS + 1}] blocks" in the_failure(verdict_on(read))


def test_a_stream_that_is_not_shown_is_noticed() -> None:
    read = readings()
    read[120] = replace(read[120], blocks=0)
    assert f"held [0, {BLOCKS}] blocks" in the_failure(verdict_on(read))


@pytest.mark.parametrize(("late", "num_failures"), [(5, 0), (10, 0), (11, 1)])
def test_the_last_readings_may_come_after_the_end(late: int, num_failures: int) -> None:
    read = readings()
    read[-late:] = [replace(r, blocks=0) for r in read[-late:]]
    assert len(verdict_on(read).failures) == num_failures


def test_a_slot_too_many_is_noticed() -> None:
    read = readings()
    read[3] = replace(read[3], slots_used=SLOTS + 1)
    assert "17 slots were used" in the_failure(verdict_on(read))


def test_blocks_that_stay_are_noticed() -> None:
    assert "1 blocks were not given back" in the_failure(verdict_on(leftover=1))


def test_latency_that_grows_is_noticed() -> None:
    # From the middle of the second tenth to that of the last are eight tenths.
    assert verdict_on(arrived=arrivals(growth=0.02)).failures == []
    assert "times the second tenth's" in the_failure(verdict_on(arrived=arrivals(growth=0.06)))


def test_latency_may_fall() -> None:
    assert verdict_on(arrived=arrivals(growth=-0.3)).failures == []


def test_too_few_readings_are_no_verdict() -> None:
    with pytest.raises(ValueError, match="19 readings are too few: at least 20"):
        judge(readings()[:19], arrivals(), 0, LIMITS)


# --- the command


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "999"], "--tokens 999: must be at least 1,000"),
        (["--beside", "-1"], "--beside -1: must be at least 0"),
        (["--sink", "-1"], "--sink -1: must be at least 0"),
        (["--window", "0"], "--window 0: must be at least 1"),
        (["--tokens", "1000", "--window", "997"], "must be at most --tokens (1,000)"),
        (["--out", "/"], "--out /: is a folder; must be a file"),
        (["--out", f"{__file__}/soak.json"], "is a file; must be a folder"),
    ],
)
def test_bad_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        soak.main(argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_server_fits_the_plan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TinyLlama().hf_config()))
    plan = soak.make_plan(tokens=5000, beside=15, token_ids=range(9))
    flags = soak.server_flags(str(tmp_path), plan, sink=4, window=253)
    values = dict(pairwise(flags))
    assert int(values["--max-model-len"]) > 5000
    assert values["--max-num-seqs"] == "17", "room for one that should not be there"
    assert int(values["--max-num-batched-tokens"]) == plan.step_tokens >= 17
    block = 32 * 3 * 2 * 2 * 32 * 4
    assert int(values["--kv-cache-memory-bytes"]) == (17 * 9 + 1) * block


# --- the tiny model with words


def test_words_are_several_characters_and_large_ids() -> None:
    spec = TinyLlama(num_words=30)
    tokenizer = tiny_tokenizer(spec.num_words)
    assert tokenizer.get_vocab_size() == spec.vocab_size == VOCAB_SIZE + 30
    assert min(spec.said) >= 257
    said = [tokenizer.decode([i]) for i in spec.said]
    assert all(len(text) == 5 for text in said)
    assert len(set(said)) == 30
    assert tokenizer.encode("aaaa", add_special_tokens=False).ids == [97] * 4


def test_only_words_are_said() -> None:
    spec = TinyLlama(num_words=30)
    head = tiny_weights(spec)["lm_head.weight"].std(dim=1)
    assert head[spec.said.start :].min() > 5 * head[: spec.said.start].max()


def test_without_words_nothing_has_changed() -> None:
    assert TinyLlama().vocab_size == VOCAB_SIZE
    assert set(random_prompt(500)) <= set(TinyLlama().said)


# --- the client


@contextmanager
def answering(status: int, *events: bytes) -> Iterator[str]:
    """A server whose only answer is these bytes, each a chunk of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in (*events, b""):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def event(ids: list[int], reason: str | None = None) -> bytes:
    choice = {"token_ids": ids, "text": "x" * len(ids), "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def received(url: str, max_tokens: int) -> list[list[int]]:
    with Completion(url, "m", [1], max_tokens, "id") as stream:
        return [piece.token_ids for piece in stream.pieces()]


def test_events_across_and_within_chunks() -> None:
    data = event([1]) + event([2, 3]) + event([4], "length") + b"data: [DONE]\n\n"
    cuts = [data[:7], data[7:100], data[100:101], data[101:]]
    for chunks in ([data], cuts, [data[i : i + 1] for i in range(len(data))]):
        with answering(200, *chunks) as url:
            assert received(url, 4) == [[1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("status", "events", "message"),
    [
        (400, [b"no such thing"], "HTTP 400: no such thing"),
        (200, [event([1])], "ended after 1, finish_reason None"),
        (200, [event([1], "stop"), b"data: [DONE]\n\n"], "ended after 1, finish_reason 'stop'"),
        (200, [event([1]), b'data: {"error": "out of luck"}\n\n'], "out of luck"),
    ],
)
def test_streams_that_fail(status: int, events: list[bytes], message: str) -> None:
    with answering(status, *events) as url, pytest.raises(StreamError, match=message):
        received(url, 4)
