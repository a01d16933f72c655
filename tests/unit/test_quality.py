"""The quality benchmark's reference, texts and arithmetic."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality import __main__ as quality
from benchmarks.quality import streaming_llm, text
from benchmarks.quality.checkpoint import Checkpoint
from benchmarks.quality.perplexity import BLOCK, block_sums, perplexity, stretches
from benchmarks.quality.results import Results
from benchmarks.quality.schemes import KINDS, Scheme, schemes
from benchmarks.quality.streaming_llm import LlamaShape, StreamingLlama
from benchmarks.quality.table import table
from benchmarks.quality.text import TEXTS, documents, load_text
from benchmarks.tiny_llama import random_prompt
from support.naive_streaming import by_cache_index, by_stream_position, naive_streaming_nats
from support.oracle_llama import OracleLlama, full_mask

TOLERANCE = 1e-9
"""Both sides are float64."""
TOKENS = random_prompt(50, seed=5)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> StreamingLlama:
    return StreamingLlama.from_folder(tiny_model, torch.float64)


@pytest.fixture(scope="module")
def naive(tiny_model: Path) -> Callable[..., Tensor]:
    config = json.loads((tiny_model / "config.json").read_text())
    weights = load_file(tiny_model / "model.safetensors")

    def score(*args: object) -> Tensor:
        return naive_streaming_nats(config, weights, *args)  # type: ignore[arg-type]

    return score


@pytest.mark.parametrize(("sink", "window"), [(4, 12), (0, 7), (3, 1), (12, 20)])
def test_the_reference_is_streaming_llm(
    reference: StreamingLlama, naive: Callable[..., Tensor], sink: int, window: int
) -> None:
    expected = naive(TOKENS, sink, window, by_cache_index)
    for chunk in (1, 7, 64, 1000):
        found = reference.score(TOKENS, sink, window, chunk=chunk)
        assert (found - expected).abs().max() < TOLERANCE, chunk


def test_control_other_positions_are_noticed(
    reference: StreamingLlama, naive: Callable[..., Tensor]
) -> None:
    """Rotary scores see only differences, so a shift of all is the same; the sink's own is not."""

    def sink_stays(num_entries: int, num_read: int) -> Tensor:
        places = by_stream_position(num_entries, num_read)
        places[:4] = torch.arange(num_entries)[:4]
        return places

    found = reference.score(TOKENS, 4, 12)
    assert (found - naive(TOKENS, 4, 12, by_stream_position)).abs().max() < TOLERANCE
    differs = (found - naive(TOKENS, 4, 12, sink_stays)).abs() > 1e-3
    assert not differs[:16].any()
    assert differs[16:].float().mean() > 0.5


def test_a_short_stream_is_full_attention(reference: StreamingLlama, oracle: OracleLlama) -> None:
    rows = oracle.logprobs(TOKENS[:-1], full_mask(len(TOKENS) - 1))
    expected = -rows.gather(1, torch.tensor(TOKENS[1:])[:, None]).squeeze(1)
    found = reference.score(TOKENS, 4, len(TOKENS) - 4, chunk=32)
    assert (found - expected).abs().max() < TOLERANCE
    shorter = reference.score(TOKENS, 4, len(TOKENS) - 8, chunk=32)
    assert (shorter - expected).abs().max() > 1e-3


def test_the_reference_goes_on_where_it_was_stopped(
    reference: StreamingLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_llm, "EVERY", 20)
    tokens = random_prompt(100, seed=5)
    whole = reference.score(tokens, 4, 12, chunk=8)
    checkpoint = Checkpoint.of(tmp_path / "here.pt", tokens, 4, 12)
    seen: list[int] = []

    def stop_at_50(done: int) -> None:
        seen.append(done)
        if done > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference.score(tokens, 4, 12, chunk=8, on_progress=stop_at_50, checkpoint=checkpoint)
    other = Checkpoint.of(checkpoint.path, tokens, 4, 13)
    assert other.load() is None
    seen.clear()
    rest = reference.score(tokens, 4, 12, chunk=8, on_progress=seen.append, checkpoint=checkpoint)
    assert seen[0] == 56 and torch.equal(rest, whole)
    checkpoint.remove()
    assert checkpoint.load() is None


def test_what_the_reference_refuses(reference: StreamingLlama) -> None:
    with pytest.raises(ValueError, match="window=0"):
        reference.score(TOKENS, 4, 0)
    with pytest.raises(ValueError, match="rope_type='yarn': the reference knows only 'default'"):
        LlamaShape.from_config({"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}})


def test_a_longer_text_starts_the_same(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topics, stdlib = (list(itertools.islice(documents(name), 2)) for name in TEXTS)
    assert stdlib[:1] == topics and len(stdlib) == 2
    monkeypatch.setattr(text, "documents", lambda name: iter(["one", "two", "three"]))
    short, again = (load_text("topics", str(tiny_model), 5) for _ in range(2))
    assert bytes(short.ids) == b"one\n\n"
    assert short == again and short.sha256 == again.sha256
    longer = load_text("topics", str(tiny_model), 13)
    assert bytes(longer.ids) == b"one\n\ntwo\n\nthr"
    assert longer.sha256 != short.sha256


@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the text of Python 3.11.7")
def test_the_text_is_the_one_of_the_results(tiny_model: Path) -> None:
    """One token a byte here; the results' checksum is of the default model's tokens."""
    (document,) = documents("topics")
    assert len(document) == 465_126
    with pytest.raises(ValueError, match="--tokens=500000: the text 'topics' has 466273 tokens"):
        load_text("topics", str(tiny_model), 500_000)


def test_what_the_text_refuses(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="--text='poems': must be one of topics, stdlib"):
        load_text("poems", str(tiny_model), 100)
    with pytest.raises(ValueError, match="--tokens=1: must be >= 2"):
        load_text("topics", str(tiny_model), 1)


def test_perplexity_of_a_uniform_guess() -> None:
    num_tokens = 3 * BLOCK + 5
    sums = block_sums(np.full(num_tokens - 1, math.log(7), dtype=np.float32))
    assert len(sums) == 4
    assert stretches(sums, num_tokens, 2 * BLOCK) == pytest.approx([7, 7], rel=1e-6)
    assert perplexity(sums, num_tokens) == pytest.approx(7, rel=1e-6)


def test_perplexity_of_a_stretch() -> None:
    """Token `i` belongs to block `i // BLOCK`; the first token is not guessed."""
    nats = np.random.default_rng(0).random(4 * BLOCK - 1).astype(np.float32)
    sums = block_sums(nats)
    for first, last in ((0, 1), (1, 3), (3, 4), (0, 4)):
        own = nats[max(first * BLOCK - 1, 0) : last * BLOCK - 1].astype(np.float64)
        found = perplexity(sums, 4 * BLOCK, first * BLOCK, last * BLOCK)
        assert found == pytest.approx(math.exp(own.mean()))
    with pytest.raises(ValueError, match=r"tokens \[100, 1024\) of 4096: must be whole blocks"):
        perplexity(sums, 4 * BLOCK, 100, BLOCK)


def test_schemes() -> None:
    chosen = schemes(KINDS, [(4, 508), (64, 448)], [1024, 8192])
    assert [str(scheme) for scheme in chosen] == [
        "full",
        "window W=512",
        "absolute S=4 W=508",
        "streaming S=4 W=508",
        "rebase S=4 W=508 L=1024",
        "rebase S=4 W=508 L=8192",
        "streaming S=64 W=448",
        "rebase S=64 W=448 L=2048",
    ]
    assert chosen[0].num_tokens(65_536) == 16_384
    assert schemes(["rebase"], [(1, 7)], [9]) == [Scheme("rebase", 1, 7, 9)]
    for sizes, limits, message in (
        ([(-1, 8)], [9], "--sink=-1: must be >= 0"),
        ([(0, 0)], [9], "--window=0: must be >= 1"),
        ([(4, 4)], [8], r"--limits=8: must be above sink \+ window=8"),
    ):
        with pytest.raises(ValueError, match=message):
            schemes(["rebase"], sizes, limits)


def nats_of(perplexity: float, num_tokens: int) -> NDArray[np.float32]:
    return np.full(num_tokens - 1, math.log(perplexity), dtype=np.float32)


def test_results_are_kept_and_taken_up_again(tmp_path: Path) -> None:
    rebase, streaming = Scheme("rebase", 4, 508, 1024), Scheme("streaming", 4, 508)
    setup = {"model": "m", "tokens": 8192}
    path = tmp_path / "new" / "quality.json"
    results = Results.resume(path, setup)
    results.add(rebase, nats_of(6, 8192), 1.0)
    assert results.ratio(str(rebase)) is None
    results.add(streaming, nats_of(5, 8192), 2.0)
    results.add(Scheme("full"), nats_of(4, 4096), 2.0)
    again = Results.resume(path, setup)
    assert again.schemes == results.schemes
    assert again.has(rebase) and not again.has(Scheme("window", 0, 512))
    assert again.ratio(str(rebase), 4096) == pytest.approx(1.2, rel=1e-4)
    assert again.perplexity("full", 4096, 8192) is None
    assert [line.split(" | ")[1:] for line in table(again).splitlines()[2:]] == [
        ["", "", "4.00", " |"],
        ["5.00", "1.0000", "5.00", "5.00 |"],
        ["6.00", "1.2000", "6.00", "6.00 |"],
    ]
    with pytest.raises(ValueError, match=r"its results are of model='m', not 'n'; give --fresh"):
        Results.resume(path, {**setup, "model": "n"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "--tokens=1: must be >= 2"),
        (["--sink", "4"], "--sink=[4], --window=[508, 448]: give as many of each"),
        (["--limits", "9000"], "--limits=9000: the model has 8192 positions"),
        (["--limits", "512"], "--limits=512: must be above sink + window=512"),
        (["--model", "nowhere"], "--model='nowhere': must be a folder with a config.json"),
        (["--schemes", "best"], "invalid choice: 'best'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_arguments_are_named(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        quality.main(["--model", str(tiny_model), *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


WORKS_ON = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from benchmarks.quality.child import end_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), end_with_parent) as pool:
        pool.submit(print, "begun", flush=True).result()
        pool.submit(time.sleep, 300).result()
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_scheme_ends_with_the_command_that_runs_it(how: signal.Signals, tmp_path: Path) -> None:
    """It went on by itself, and wrote its checkpoint over that of the next run."""
    script = tmp_path / "works_on.py"
    script.write_text(WORKS_ON, encoding="utf-8")
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, script], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stdout=PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"begun\n"
        command.send_signal(how)
        # The end of the pipe: nobody is left who could write to it.
        assert command.communicate(timeout=20) == (b"", None)
