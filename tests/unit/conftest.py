"""The tiny model's folder, vLLM configs of it, and the plugin registered for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.patches import patched_globals

MISSING = object()


@contextmanager
def restored() -> Iterator[None]:
    """Put back what the block changes."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # so that a later test does not count on a load that is undone here
    before = [(owner, name, vars(owner).get(name, MISSING)) for owner, name in patched_globals()]
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is not MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


def as_shipped(descriptor: Any) -> Any:
    """What vLLM itself defines, with every wrapper taken off."""
    is_static = isinstance(descriptor, staticmethod)
    function = descriptor.__func__ if is_static else descriptor
    while hasattr(function, "__wrapped__") and hasattr(function, "_bounded_kv_patch"):
        function = function.__wrapped__
    return staticmethod(function) if is_static else function


@pytest.fixture
def stock_vllm() -> Iterator[None]:
    """vLLM as it ships, whatever this process has registered before."""
    with restored():
        for owner, name in patched_globals():
            if name in ("bounded_kv_figures", "bounded_kv_sources"):
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, as_shipped(vars(owner)[name]))
        yield


@pytest.fixture
def plugin(stock_vllm: None) -> None:
    """The plugin registered, as its entry point does it in every process."""
    from vllm_bounded_kv.engine.plugin import register

    register()


MakeArgs = Callable[..., Any]


@pytest.fixture
def engine_args(tiny_model: Path) -> MakeArgs:
    """Makes `EngineArgs` of the tiny model; `bounded=None` leaves the plugin out."""

    def make(bounded: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        settings: dict[str, Any] = {
            "model": str(tiny_model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 64 << 20,
            **kwargs,
        }
        if bounded is not None:
            settings["additional_config"] = {"kv_plugin": "bounded", "bounded_kv": bounded}
        return EngineArgs(**settings)

    return make
