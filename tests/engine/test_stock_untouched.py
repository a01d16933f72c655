"""Stock vLLM stays stock beside the plugin: before, without and after a bounded engine.

Each story needs a process in which nothing else has happened, so this file is also a program:
`python test_stock_untouched.py STORY MODEL` tells the story and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_llama import random_prompt
from support.engine import Ask, Engine

LONG = 300
"""Tokens of the longest prompt: several times what the bounded engine retains."""

PLUGINS = "VLLM_PLUGINS"
"""Which plugins vLLM loads, all unless it is set: the one setting in which the stories differ."""

Seen = dict[str, Any]


def patched() -> list[str]:
    """Functions of vLLM's that are not as vLLM ships them."""
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    names = []
    for owner in (EngineArgs, AsyncLLM, EngineCore, InputProcessor, vllm.plugins):
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            if code is not None and "vllm_bounded_kv" in code.co_filename:
                names.append(f"{owner.__name__}.{name}")
    return sorted(names)


def registries() -> Seen:
    """Everything that a bounded engine registers itself with."""
    import vllm.plugins
    from vllm.v1.attention.backends import registry
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST, KVCacheSpecRegistry

    KVCacheSpecRegistry._ensure_registered()
    specs = _REGISTRY_KVCACHESPEC_LIST.items()
    return {
        "specs": {spec.__name__: kind.manager_class.__name__ for spec, kind in specs},
        "overrides": {str(k): v for k, v in registry._ATTN_OVERRIDES.items()},
        "endpoints": [p.name for p in vllm.plugins.load_endpoint_plugins(("generate",))],
        "settings": sorted(k for k in os.environ if k.startswith("VLLM_") and k != PLUGINS),
    }


def ours() -> list[str]:
    """Modules of the plugin's that are imported."""
    return sorted(name for name in sys.modules if name.startswith("vllm_bounded_kv.engine."))


def stock_run(model: Path) -> Seen:
    """A stock engine of its own: its parts, and what it says with which blocks, step by step."""
    engine = Engine(model, None, max_num_batched_tokens=256)
    blocks: list[Any] = []

    def on_step(_: int) -> None:
        manager = engine.scheduler.kv_cache_manager
        blocks.append([list(manager.get_block_ids(r.request_id)) for r in engine.scheduler.running])

    source = random_prompt(160, seed=5)
    asks = [
        Ask(random_prompt(LONG, seed=1), 40),
        Ask(source + random_prompt(9, seed=2), 40),
        # Stock neither reads nor refuses the plugin's arguments.
        Ask(random_prompt(20, seed=3), 150, {"kv_window": "no number", "kv_bogus": 1}),
    ]
    first = engine.run(asks, poison=False, on_step=on_step)
    hit = engine.run([Ask(source + random_prompt(9, seed=4), 40)], poison=False, on_step=on_step)
    (layer, *_) = engine.runner.attn_groups[0]
    parts = (
        *(engine.scheduler, engine.core, engine.runner),
        engine.engine.model_executor.driver_worker.worker,
        *engine.scheduler.kv_cache_manager.coordinator.single_type_managers,
        *(layer.backend(), layer.kv_cache_spec, layer.get_metadata_builder()),
    )
    tables = engine.runner.input_batch.block_table.block_tables
    seen = {
        "parts": [f"{type(part).__module__}.{type(part).__name__}" for part in parts],
        "block size": engine.scheduler.cache_config.block_size,
        "pool": engine.pool.num_gpu_blocks,
        "slot mapping": [str(table.slot_mapping_mode) for table in tables],
        "additional": engine.engine.vllm_config.additional_config,
        "tokens": [answer.tokens for answer in (*first, *hit)],
        "logprobs": [answer.logprobs for answer in (*first, *hit)],
        "cached": [answer.num_cached for answer in (*first, *hit)],
        "blocks": blocks,
    }
    engine.close()
    return seen


def bounded_run(model: Path) -> Seen:
    policy = {"sink": 4, "window": 60, "positions": "absolute"}
    engine = Engine(model, policy, max_num_batched_tokens=256)
    (answer,) = engine.run([Ask(random_prompt(LONG, seed=1), 40)])
    engine.close()
    return {"tokens": answer.tokens}


def tell_without(model: Path) -> Seen:
    """vLLM alone: VLLM_PLUGINS names no plugin."""
    stock = stock_run(model)
    return {"patched": patched(), "registries": registries(), "stock": stock}


def tell_no_flag(model: Path) -> Seen:
    """The plugin is installed, and nobody asks for it."""
    stock = stock_run(model)
    return {"patched": patched(), "ours": ours(), "registries": registries(), "stock": stock}


def tell_beside(model: Path) -> Seen:
    """A bounded engine between two stock ones, all in one process."""
    seen = {"before": stock_run(model), "bounded": bounded_run(model), "after": stock_run(model)}
    return {**seen, "registries": registries()}


STORIES = {"without": tell_without, "no_flag": tell_no_flag, "beside": tell_beside}


def told(story: str, model: Path) -> Seen:
    """The story, told by a process of its own."""
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    env.pop(PLUGINS, None)
    if story == "without":
        env[PLUGINS] = ""
    command = [sys.executable, __file__, story, str(model)]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    seen: Seen = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.fixture(scope="module")
def without(tiny_model: Path) -> Seen:
    return told("without", tiny_model)


@pytest.fixture(scope="module")
def no_flag(tiny_model: Path) -> Seen:
    return told("no_flag", tiny_model)


@pytest.fixture(scope="module")
def beside(tiny_model: Path) -> Seen:
    return told("beside", tiny_model)


def test_control_the_plugin_can_be_left_out(without: Seen) -> None:
    assert without["patched"] == []


def test_without_the_flag_two_functions_hand_through(no_flag: Seen) -> None:
    always_on = ["EngineArgs.add_cli_args", "EngineArgs.create_engine_config"]
    assert no_flag["patched"] == always_on


def test_without_the_flag_no_module_that_registers_is_imported(no_flag: Seen) -> None:
    needed = ("cli", "compat", "extensions", "plugin", "policy", "settings")
    assert no_flag["ours"] == [f"vllm_bounded_kv.engine.{name}" for name in needed]


def test_without_the_flag_the_registries_are_vllms(without: Seen, no_flag: Seen) -> None:
    assert no_flag["registries"] == without["registries"]
    assert without["registries"]["specs"]["FullAttentionSpec"] == "FullAttentionManager"
    assert without["registries"]["overrides"] == {}


def test_a_bounded_engine_adds_its_own_spec_and_route_only(without: Seen, beside: Seen) -> None:
    expected = without["registries"]
    specs = {**expected["specs"], "BoundedAttentionSpec": "BoundedBlockManager"}
    assert beside["registries"] == {**expected, "specs": specs, "endpoints": ["bounded"]}


def test_stock_with_the_plugin_installed_is_stock(without: Seen, no_flag: Seen) -> None:
    assert without["stock"]["cached"] == [0, 0, 0, 128]  # so hashes are compared too
    assert len(without["stock"]["blocks"]) > 150
    assert no_flag["stock"] == without["stock"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_stock_beside_a_bounded_engine_is_stock(without: Seen, beside: Seen, when: str) -> None:
    assert beside[when] == without["stock"]


def test_control_the_bounded_engine_says_something_else(beside: Seen) -> None:
    assert beside["bounded"]["tokens"] != beside["before"]["tokens"][0]


if __name__ == "__main__":
    print(json.dumps(STORIES[sys.argv[1]](Path(sys.argv[2]))))
