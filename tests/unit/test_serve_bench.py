"""The comparison of servers: what it refuses, resumes and reports. Not how fast anybody is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import __main__ as entry
from benchmarks.serve import peers, run
from benchmarks.serve.client import AskError, ask, metrics, session
from benchmarks.serve.house import reason
from benchmarks.serve.peers import PEERS
from benchmarks.serve.plot import plot
from benchmarks.serve.records import Cell, Records, summary
from benchmarks.serve.table import failures, table
from benchmarks.serve.transformers_server import CroppedStream
from benchmarks.serve.window_model import windowed_copy
from benchmarks.tiny_llama import TinyLlama, cached_tiny_llama, random_prompt

MODEL = ["--model", "nowhere"]


def test_an_unknown_benchmark_is_refused_with_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["nothing"]) == 2
    said = capsys.readouterr().err
    assert "'nothing' is no benchmark" in said and all(name in said for name in entry.COMMANDS)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--window", "0"], "--window=0: must be >= 1"),
        (["--positions", "20"], "--positions=20: must be >= 49"),
        (["--length", "100"], "--length=100: must be >= 257"),
        (["--rates", "1", "0"], "--rates=0.0: must be >= 0.001"),
        (["--peers", "bounded,sglang"], "--peers='sglang': must be of bounded, stock"),
        (MODEL, "--model='nowhere': must be a folder with a tokenizer.json"),
    ],
)
def test_arguments_are_refused_by_name(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        entry.main(["serve", *options])
    assert complaint in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_said_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_llama(module: str) -> Any:
        return None if module == "llama_cpp" else object()

    monkeypatch.setattr(peers, "find_spec", without_llama)
    assert run._peers(None) == ["bounded", "stock", "stock-window", "transformers"]
    assert "llamacpp: left out: not installed; pip install 'llama-cpp" in capsys.readouterr().err
    with pytest.raises(ValueError, match="none of them is installed"):
        run._peers("llamacpp")


def test_records_are_resumed_but_not_of_another_setup(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    cell = Cell("latency", "stock", 512, "", 0)
    Records(path, {"threads": 1}).add(cell, {"itl_ms": 3.0})
    again = Records(path, {"threads": 1})
    assert again.has(cell) and not again.has(Cell("latency", "stock", 512, "", 1))
    with pytest.raises(ValueError, match=r"records are of threads=1, not 2; give --fresh"):
        Records(path, {"threads": 2})


def _result() -> dict[str, Any]:
    records: list[dict[str, Any]] = []
    for number, itl in enumerate([10.0, 30.0, 20.0]):
        for peer in ("bounded", "stock"):
            at = {"peer": peer, "given": "", "round": number}
            figures = {"itl_ms": itl, "prefill_s": 1.5, "cache_bytes": 12e6}
            records.append({**at, "row": "latency", "x": 512, **figures})
            records.append({**at, "row": "closed", "x": 16, "tokens_per_s": 150.25})
            waited = {"ttft_ms_p50": 50.0, "ttft_ms_p95": 1234.0, "itl_ms_p95": 80.0}
            records.append({**at, "row": "open", "x": 0.5, **waited, "goodput_per_s": 0.4})
    failed = {"row": "latency", "peer": "stock", "x": 9000, "given": "", "round": 0}
    records.append({**failed, "failed": "too long"})
    work = {"model": "tiny", "sink": 4, "window": 252, "threads": 1}
    setup = {"peers": {"bounded": "", "stock": ""}, "work": work}
    return {"setup": setup, "rows": summary(records)}


def test_a_result_becomes_a_table_and_a_picture(tmp_path: Path) -> None:
    result = _result()
    lines = table(result).splitlines()
    assert "| ms a token at position 512 | 20 (10 to 30) | 20 (10 to 30) |" in lines
    assert "| ms a token at position 9,000 |  | failed |" in lines
    assert "| tokens/s, 16 clients, one pool | 150 | 150 |" in lines
    assert failures(result) == ["stock, latency at 9000: failed: too long"]
    plot(result, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_the_reason_is_the_line_that_names_an_error() -> None:
    assert reason("INFO fine\nValueError: no room\n  bye\n") == "ValueError: no room"
    assert reason("nothing\nlast") == "last"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_tiny_llama(tmp_path_factory.mktemp("models"), TinyLlama(num_layers=2))


def test_a_windowed_copy_is_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    folder = windowed_copy(str(tiny), 256, tmp_path / "copy")
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 256
    assert "sliding_window" not in json.loads((tiny / "config.json").read_text())
    assert (folder / "model.safetensors").samefile(tiny / "model.safetensors")
    with pytest.raises(ValueError, match="stock-window needs a folder"):
        windowed_copy("hub/name", 256, tmp_path / "other")


def test_the_cropped_cache_stays_as_it_is(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    stream, whole = CroppedStream(model, 4, 12), CroppedStream(model, 4, 10_000)
    prompt = random_prompt(16)
    assert stream.step(prompt) == whole.step(prompt)  # nothing is cropped yet
    first = stream.cache.layers[0].keys[..., :4, :].clone()
    for token in random_prompt(20, seed=1):
        stream.step([token])
    assert stream.cache.get_seq_length() == 16
    assert torch.equal(stream.cache.layers[0].keys[..., :4, :], first)  # the sink, as it was
    spec = TinyLlama()
    assert stream.num_bytes == 2 * 2 * spec.num_kv_heads * spec.head_dim * 4 * 16


async def _show(request: web.Request) -> web.Response:
    return web.Response(
        text='vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:cache_config_info{engine="0",num_gpu_blocks="5"} 1.0\n'
    )


def test_the_null_block_is_no_part_of_what_is_held() -> None:
    async def shown() -> dict[str, float]:
        app = web.Application()
        app.router.add_get("/metrics", _show)
        async with TestServer(app) as server, session() as http:
            return await metrics(http, str(server.make_url("")).rstrip("/"))

    work = Mock(pool_bytes=1000)
    assert PEERS["stock"].cache_bytes(asyncio.run(shown()), work) == 400


async def _completions(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["prompt"] == [0]:
        return web.json_response({"error": {"message": "prompt too long"}}, status=400)
    response = web.StreamResponse()
    await response.prepare(request)
    for ids in ([7], [8, 9]):
        choices = [{"text": "", "token_ids": ids}]
        await response.write(f"data: {json.dumps({'choices': choices})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def test_tokens_of_one_event_share_its_time() -> None:
    async def three() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", _completions)
        async with TestServer(app) as server, session() as http:
            url = str(server.make_url("")).rstrip("/")
            body = PEERS["bounded"].body([1, 2], 3)
            answer = await ask(http, url, body)
            assert len(answer.times) == 3 and answer.ttft_s > 0
            assert answer.gaps_s[0] == pytest.approx(answer.gaps_s[1])
            with pytest.raises(AskError, match="3 tokens came, not 4"):
                await ask(http, url, PEERS["bounded"].body([1], 4))
            with pytest.raises(AskError, match="HTTP 400: prompt too long"):
                await ask(http, url, PEERS["bounded"].body([0], 4))

    asyncio.run(three())
