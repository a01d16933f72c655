"""Patches of vLLM: applied once, hand through, and fail by name where vLLM has moved on."""

from __future__ import annotations

import importlib
import random
import re
import select
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.patches import LORA_OPS
from vllm_bounded_kv.engine import compat


def ignore(*args: Any) -> None:
    """A callback that does nothing."""


LORA_MODULES = ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu")
INSTALL: list[tuple[Callable[[], None], list[str]]] = [
    (lambda: compat.install_cli(ignore), ["EngineArgs.add_cli_args"]),
    (
        lambda: compat.install_engine_config(lambda args: ignore, ignore),
        ["EngineArgs.create_engine_config"],
    ),
    (
        lambda: compat.install_front_end(ignore, ignore, ignore),
        [
            "InputProcessor.process_inputs",
            "AsyncLLM.generate",
            "AsyncLLM._add_streaming_input_request",
        ],
    ),
    (compat.install_engine_core_hooks, ["EngineCore.preprocess_add_request"]),
    (lambda: compat.install_endpoint(ignore), ["vllm.plugins.load_endpoint_plugins"]),
    (compat.forget_sent_text, ["BaseIncrementalDetokenizer.get_next_output_text"]),
    (compat.drain_notifications, ["SpinCondition.record_read"]),
    (
        compat.leave_rows_without_adapter_alone,
        [f"{module}.bgmv_{name}" for module in LORA_MODULES for name in LORA_OPS],
    ),
]
PATCHED = [target for _, targets in INSTALL for target in targets]


def owner_of(target: str) -> Any:
    import vllm.plugins
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.input_processor import InputProcessor

    owners: dict[str, Any] = {
        owner.__name__: owner
        for owner in (
            EngineArgs,
            AsyncLLM,
            EngineCore,
            InputProcessor,
            BaseIncrementalDetokenizer,
            SpinCondition,
        )
    }
    modules = {name: importlib.import_module(name) for name in LORA_MODULES}
    return {**owners, **modules, "vllm.plugins": vllm.plugins}[target.rpartition(".")[0]]


def descriptor(target: str) -> Any:
    return vars(owner_of(target))[target.rpartition(".")[2]]


def function(target: str) -> Any:
    found = descriptor(target)
    return found.__func__ if isinstance(found, staticmethod) else found


@pytest.mark.parametrize(("install", "targets"), INSTALL, ids=[t[0] for _, t in INSTALL])
def test_installing_twice_patches_once(
    stock_vllm: None, install: Callable[[], None], targets: list[str]
) -> None:
    others = {target: descriptor(target) for target in PATCHED if target not in targets}
    originals = {target: descriptor(target) for target in targets}
    stock = [function(target) for target in targets]
    install()
    once = [descriptor(target) for target in targets]
    for target, original, patched in zip(targets, stock, once, strict=True):
        assert patched is not original
        assert type(patched) is type(originals[target])
        assert function(target).__wrapped__ is original
        assert (function(target).__name__, function(target).__doc__) == (
            original.__name__,
            original.__doc__,
        )
    install()
    assert [descriptor(target) for target in targets] == once
    assert {target: descriptor(target) for target in others} == others


def test_registering_any_number_of_times(stock_vllm: None) -> None:
    from vllm_bounded_kv.engine.plugin import register

    always_on = ("EngineArgs.add_cli_args", "EngineArgs.create_engine_config")
    stock = {target: function(target) for target in PATCHED}
    for _ in range(3):
        register()
        for target in PATCHED:
            patched = function(target)
            expected = patched.__wrapped__ if target in always_on else patched
            assert expected is stock[target]


def test_a_patch_below_somebody_elses_wrapper_is_not_repeated(stock_vllm: None) -> None:
    import functools

    from vllm.engine.arg_utils import EngineArgs

    def install() -> None:
        compat.install_engine_config(lambda args: ignore, ignore)

    install()
    ours = EngineArgs.create_engine_config

    @functools.wraps(ours)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    EngineArgs.create_engine_config = theirs
    install()
    assert EngineArgs.create_engine_config is theirs


@pytest.mark.parametrize(
    ("install", "target"),
    [(install, t) for install, targets in INSTALL for t in targets],
    ids=PATCHED,
)
def test_a_target_that_vllm_no_longer_has_is_named(
    stock_vllm: None, install: Callable[[], None], target: str
) -> None:
    delattr(owner_of(target), target.rpartition(".")[2])
    message = f"vLLM no longer has {target}; this release of vllm-bounded-kv cannot work with it"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        install()


# --- what the patches around the config do


def test_the_config_is_only_touched_when_the_plugin_is_asked_for(stock_vllm: None) -> None:
    from vllm.engine.arg_utils import EngineArgs

    calls: list[Any] = []

    class Args(EngineArgs):
        def __init__(self, additional_config: dict[str, Any], fails: bool = False) -> None:
            self.additional_config = additional_config
            self.fails = fails

    def original(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(("made", args, kwargs))
        if self.fails:
            raise OSError("no such model")
        return "config"

    def before(args: Any) -> Callable[[], None]:
        calls.append("before")
        return lambda: calls.append("undone")

    EngineArgs.create_engine_config = original
    compat.install_engine_config(before, lambda config: calls.append(("after", config)))

    assert Args({}).create_engine_config(1, headless=True) == "config"
    assert calls == [("made", (1,), {"headless": True})]

    calls.clear()
    bounded = {"kv_plugin": "bounded"}
    assert Args(bounded).create_engine_config(1, headless=True) == "config"
    assert calls == ["before", ("made", (1,), {"headless": True}), "undone", ("after", "config")]

    calls.clear()
    with pytest.raises(OSError, match="no such model"):
        Args(bounded, fails=True).create_engine_config()
    assert calls == ["before", ("made", (), {}), "undone"]


# --- versions


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "0.32", "1.32.0", "dev"])
def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    message = (
        f"--kv-plugin bounded supports vLLM 0.32.x, but vLLM {version} is installed; "
        "install vllm==0.32.0, or serve without --kv-plugin"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        compat.check_vllm_version()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1", "0.32.1.post1"])
def test_a_patch_release_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    compat.check_vllm_version()


def test_the_installed_vllm_is_accepted() -> None:
    compat.check_vllm_version()


def test_only_a_bounded_engine_asks_for_the_version(
    plugin: None, engine_args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    assert engine_args(max_model_len=512).create_engine_config().model_config.max_model_len == 512
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.32\.x, but vLLM 0\.33\.0"):
        engine_args({}).create_engine_config()


# --- the CPU backend, while a model loads


class Backend:
    """Stands in for the bounded backend."""


class Theirs:
    """An override of somebody else's."""


@pytest.mark.parametrize("previous", [None, f"{__name__}.Theirs"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_cpu_backend_is_put_back(
    monkeypatch: pytest.MonkeyPatch, previous: str | None, fails: bool
) -> None:
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum

    cpu = AttentionBackendEnum.CPU_ATTN
    monkeypatch.delitem(_ATTN_OVERRIDES, cpu, raising=False)
    if previous is not None:
        monkeypatch.setitem(_ATTN_OVERRIDES, cpu, previous)
    before = dict(_ATTN_OVERRIDES)
    path_before = cpu.get_path()
    clears: list[str] = []
    cached = SimpleNamespace(cache_clear=lambda: clears.append(cpu.get_path()))
    monkeypatch.setattr(selector, "_cached_get_attn_backend", cached)
    try:
        with compat.cpu_attention_backend(Backend):
            assert cpu.get_path() == f"{__name__}.Backend"
            assert clears == [f"{__name__}.Backend"]
            if fails:
                raise OSError("weights cut short")
    except OSError:
        assert fails
    assert (_ATTN_OVERRIDES, cpu.get_path()) == (before, path_before)
    assert clears == [f"{__name__}.Backend", path_before]


TEXTS = ["", "a", "b", "ab", "aab", "bba", "abab", "c", "", "cab"]
STOPS = [None, "ab", ["abab"], ["bb", "aba"], ["cabab", "aaab"], ["c", "bcab"], ["abcabcab"]]


def streamed(choose: random.Random, limit: int) -> tuple[list[str], int]:
    """What a streaming client is sent of random tokens, and the most text that was kept."""
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    class Detokenizer(BaseIncrementalDetokenizer):
        def decode_next(self, next_token_id: int) -> str:
            return TEXTS[next_token_id]

    params = SimpleNamespace(
        stop=choose.choice(STOPS),
        min_tokens=choose.choice([0, 0, 3, 7]),
        include_stop_str_in_output=choose.random() < 0.5,
    )
    interval = choose.choice([1, 1, 3])
    detokenizer = Detokenizer(SimpleNamespace(sampling_params=params))  # type: ignore[arg-type]
    sent, kept = [], 0
    for step in range(limit):
        new = [choose.randrange(len(TEXTS)) for _ in range(choose.choice([1, 1, 1, 2, 4, 0]))]
        stopped = detokenizer.update(new, False)
        finished = bool(stopped) or step == limit - 1
        if step % interval == 0 or finished:
            sent.append(detokenizer.get_next_output_text(finished, True))
        kept = max(kept, len(detokenizer.output_text))
        if finished:
            break
    return sent, kept


def test_forgetting_sent_text_changes_no_text(stock_vllm: None) -> None:
    """Whatever is to be looked for in it."""
    seeds = range(3000)
    stock = [streamed(random.Random(seed), 40) for seed in seeds]
    compat.forget_sent_text()
    forgetful = [streamed(random.Random(seed), 40) for seed in seeds]
    assert [sent for sent, _ in forgetful] == [sent for sent, _ in stock]
    assert max(kept for _, kept in stock) > 40
    assert max(kept for _, kept in forgetful) < 40


@pytest.mark.parametrize("name", LORA_OPS)
def test_rows_without_adapter_are_left_alone(stock_vllm: None, name: str) -> None:
    """And all others bit for bit as they were; stock vLLM gives them the last adapter."""
    from vllm.lora.ops.torch_ops import lora_ops

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 4, generator=generator)
    weights = torch.randn(2, 1, 6, 4, generator=generator)
    rest: tuple[Any, ...] = {"shrink": (0.5,), "expand": (True,), "expand_slice": (1, 6, True)}[
        name
    ]

    def outputs(adapters: list[int]) -> torch.Tensor:
        out = torch.zeros(5, 8)
        getattr(lora_ops, f"bgmv_{name}")(inputs, weights, out, torch.tensor(adapters), *rest)
        return out

    stock = outputs([1, 0, 1, 0, 1])
    assert torch.equal(outputs([-1, 0, 1, 0, 1]), stock)
    compat.leave_rows_without_adapter_alone()
    assert torch.equal(outputs([1, 0, 1, 0, 1]), stock)
    some = outputs([-1, 0, 1, 0, -1])
    assert torch.equal(some[1:4], stock[1:4])
    assert not some[[0, 4]].any()


@pytest.mark.parametrize("patched", [True, False])
def test_a_reader_that_never_waits_leaves_no_commands_in_its_socket(
    stock_vllm: None, patched: bool
) -> None:
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    if patched:
        compat.drain_notifications()
    with zmq.Context() as context:
        address = get_open_zmq_ipc_path()
        writer = SpinCondition(False, context, address)
        reader = SpinCondition(True, context, address)
        sockets = [
            writer.local_notify_socket,
            reader.local_notify_socket,
            reader.read_cancel_socket,
            reader.write_cancel_socket,
        ]
        try:
            commands = reader.local_notify_socket.getsockopt(zmq.FD)
            deadline = time.monotonic() + 60
            reader.busy_loop_s = 0
            while reader.local_notify_socket.poll(10) == 0:  # until it has subscribed
                writer.notify()
                assert time.monotonic() < deadline
            while reader.local_notify_socket.poll(200):  # a reader that has gone to sleep
                reader.wait()
            writer.notify()
            assert select.select([commands], [], [], 60)[0]
            reader.record_read()
            assert bool(select.select([commands], [], [], 0)[0]) is not patched
            assert reader.local_notify_socket.poll(60_000)  # still there for who would wait
        finally:
            for socket in sockets:
                socket.close(linger=0)
