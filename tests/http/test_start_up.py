"""Configurations that must not start: a clear error that names the flag, its value and the limit.

Most need vLLM's parser and config only, so they run in this process. Two need an engine, and one a
whole `vllm serve`: its engine fails in a process of its own, and the server must end and say why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from support.engine import Engine
from support.patches import patched_globals
from support.server import BLOCK_BYTES, TINY, tiny_server_flags
from vllm_bounded_kv.launch import ServerError, VllmServer

BOUNDED = ["--kv-plugin", "bounded", "--bounded-kv-positions", "absolute"]
END_S = 60.0
"""Longest that a server may take to give up."""

Config = Callable[..., Any]


@pytest.fixture
def config(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The engine config that `vllm serve <tiny model> ...` makes."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)

    def make(*flags: str) -> Any:
        parser = FlexibleArgumentParser(prog="vllm")
        ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
        words = ["serve", str(tiny_model), *tiny_server_flags(39), *flags]
        args = parser.parse_args(words)
        args.model = args.model_tag
        return AsyncEngineArgs.from_cli_args(args).create_engine_config()

    return make


SPECULATION = '{"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
CONNECTOR = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
SHORT = ["--max-model-len", "512"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [*SHORT, "--bounded-kv-sink", "512"],
            r"max\(sink, max_source_len\)=512: leaves no window within .*=512",
        ),
        (
            [*SHORT, "--bounded-kv-max-source-len", "600"],
            r"max\(sink, max_source_len\)=600: leaves no window within .*512",
        ),
        (
            [*SHORT, "--bounded-kv-sink", "500", "--bounded-kv-window", "13"],
            r"sink \+ window=513: is larger than max_model_len=512",
        ),
        (["--bounded-kv-sink", "-1"], "sink=-1: must be >= 0"),
        (["--bounded-kv-window", "0"], "window=0: must be >= 1"),
        (["--bounded-kv-max-slots", "0"], "max_slots=0: must be >= 1"),
        (
            ["--speculative-config", SPECULATION],
            "speculative decoding by ngram_gpu .--speculative-config",
        ),
        (["--kv-transfer-config", CONNECTOR], "KV connectors .*--kv-transfer-config"),
        (["--kv-offloading-size", "1"], "offloading .*--kv-offloading-size"),
        (["--kv-cache-dtype", "fp8"], "quantised KV cache.*--kv-cache-dtype fp8"),
        (
            ["--enforce-eager", "--pipeline-parallel-size", "2"],
            "--pipeline-parallel-size 2 with --enforce-eager",
        ),
        (["--kv-sharing-fast-prefill"], "cross-layer KV sharing"),
        (["--runner", "pooling"], "--runner pooling"),
    ],
)
def test_refused_before_anything_is_loaded(config: Config, flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(*BOUNDED, *flags)


def test_the_same_flags_without_the_refused_one_are_fine(config: Config) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forget_patches(patch)
        assert (
            config(*BOUNDED, *SHORT, "--bounded-kv-sink", "500").model_config.max_model_len == 512
        )


def forget_patches(patch: pytest.MonkeyPatch) -> None:
    """Whatever a config that is accepted installs in this process is undone with `patch`."""
    for owner, name in patched_globals():
        if name in vars(owner):
            patch.setattr(owner, name, vars(owner)[name])


def test_an_unknown_plugin(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config("--kv-plugin", "unbounded")
    assert ended.value.code != 0
    error = capsys.readouterr().err
    assert "--kv-plugin: invalid choice: 'unbounded' (choose from 'bounded')" in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--bounded-kv-config='.*kv.yaml': cannot be read: No such file"),
        ("sink: [4", "--bounded-kv-config='.*kv.yaml': is not valid YAML"),
        ("- sink", "--bounded-kv-config='.*kv.yaml': must contain a mapping"),
        ("sinks: 4", "sinks=4: unknown bounded_kv setting; known: .*'sink'"),
        ("window: lots", "window='lots': must be an integer"),
    ],
)
def test_a_bad_settings_file(
    config: Config, tmp_path: Path, text: str | None, message: str
) -> None:
    file = tmp_path / "kv.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        config(*BOUNDED, "--bounded-kv-config", str(file))


def test_positions_beyond_the_rotary_table(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM is told to look away; positions that fall back need no such thing."""
    flags = [*BOUNDED, "--max-model-len", str(TINY.max_position_embeddings + 1)]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"--max-model-len=8193: .*8192 rotary positions"):
            config(*flags)
        monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    with pytest.MonkeyPatch.context() as patch:
        forget_patches(patch)
        rebased = config(*flags[:-1], "3000000", "--bounded-kv-positions", "rebase")
    assert rebased.model_config.max_model_len == 3_000_000
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in os.environ


@pytest.mark.parametrize("limit", ["64", "8193"])
def test_a_position_limit_that_cannot_be(config: Config, limit: str) -> None:
    flags = [*BOUNDED, "--bounded-kv-positions", "rebase", "--bounded-kv-window", "60"]
    with pytest.raises(
        ValueError, match=rf"--bounded-kv-position-limit={limit}: .*window=64 .*8192 positions"
    ):
        config(*flags, "--bounded-kv-position-limit", limit)


# --- what only an engine can tell


@pytest.fixture
def in_process() -> Iterator[None]:
    """Engines may fail half-built in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cores = os.sched_getaffinity(0)
    with pytest.MonkeyPatch.context() as patch:
        forget_patches(patch)
        yield
    cleanup_dist_env_and_memory()
    os.sched_setaffinity(0, cores)


def test_more_slots_than_the_pool_holds(tiny_model: Path, in_process: None) -> None:
    policy = {"sink": 4, "window": 60, "max_slots": 5, "positions": "absolute"}
    with pytest.raises(
        ValueError, match=r"--bounded-kv-max-slots=5: needs 10 blocks of 32 .*the pool has 9"
    ):
        Engine(tiny_model, policy, kv_cache_memory_bytes=10 * BLOCK_BYTES)


def test_a_pool_smaller_than_one_slot(tiny_model: Path, in_process: None) -> None:
    policy = {"sink": 4, "window": 124, "positions": "absolute"}
    with pytest.raises(
        ValueError, match=r"sink \+ window=128: needs 5 blocks of 32 .*holds 4; lower"
    ):
        Engine(tiny_model, policy, kv_cache_memory_bytes=4 * BLOCK_BYTES)


def test_a_server_whose_engine_refuses_ends_and_says_why(tiny_model: Path) -> None:
    flags = [*tiny_server_flags(9), *BOUNDED, "--bounded-kv-window", "60"]
    server = VllmServer(tiny_model, [*flags, "--bounded-kv-max-slots", "5"])
    with pytest.raises(ServerError, match=r"ended with [1-9]"), server:
        pass
    assert "--bounded-kv-max-slots=5: needs 10 blocks of 32 entries (2 a slot)" in server.log


# --- the plugin turns on its own endpoint, and no other


class OtherEndpoint:
    """An endpoint plugin of somebody else's, which must be named to act."""

    name = "other"
    required_tasks = ("generate",)


@pytest.fixture
def other_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    real = importlib.metadata.entry_points
    point = EntryPoint("other", f"{__name__}:OtherEndpoint", "vllm.endpoint_plugins")

    def entry_points(**params: Any) -> Any:
        return [point] if params == {"group": "vllm.endpoint_plugins"} else real(**params)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    forget_patches(monkeypatch)


def loaded_endpoints() -> list[str]:
    import vllm.plugins

    return [plugin.name for plugin in vllm.plugins.load_endpoint_plugins(("generate",))]


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, ["bounded"]), ("other,bounded", ["other", "bounded"]), ("bounded", ["bounded"])],
)
def test_only_its_own_endpoint_is_turned_on(
    config: Config,
    other_endpoint: None,
    monkeypatch: pytest.MonkeyPatch,
    named: str | None,
    expected: list[str],
) -> None:
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    config(*BOUNDED)
    assert loaded_endpoints() == expected
    assert os.environ.get("VLLM_PLUGINS") == named


def test_stock_vllm_gets_no_endpoint(tiny_model: Path) -> None:
    """In a process of its own: nothing of the plugin is installed, and nothing is imported."""
    program = """
import sys
import vllm.plugins
from vllm import AsyncEngineArgs

vllm.plugins.load_general_plugins()
AsyncEngineArgs(model=sys.argv[1], enforce_eager=True).create_engine_config()
assert vllm.plugins.load_endpoint_plugins(("generate",)) == []
assert "vllm_bounded_kv.engine.endpoint" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tiny_model)], check=True, timeout=END_S)
