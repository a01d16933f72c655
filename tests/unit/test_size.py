"""`bounded-kv size`: its figures are the engine's, and its refusals too.

`tests/http/test_sizing.py` compares it with a server that runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.server import BLOCK_BYTES, BLOCK_SIZE, START_UP_LINE, TINY
from vllm_bounded_kv.engine.policy import EnginePolicy, PolicyError
from vllm_bounded_kv.engine.refusals import check_declared_layers
from vllm_bounded_kv.engine.settings import policy_of
from vllm_bounded_kv.engine.slots import blocks_in, divide
from vllm_bounded_kv.tools.main import main
from vllm_bounded_kv.tools.model import ModelError, model_config
from vllm_bounded_kv.tools.size import Sizing, memory_of, readable, sizing_of

ENTRY_BYTES = BLOCK_BYTES // BLOCK_SIZE
SETTINGS = {"sink": 5, "window": 96, "max_source_len": 96}


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Any:
    return model_config(str(tiny_model), "float32")


def sized(model: Any, settings: dict[str, Any] | None = None, **options: Any) -> Sizing:
    return sizing_of(model, SETTINGS if settings is None else settings, name="tiny", **options)


def changed(tiny_model: Path, folder: Path, **values: Any) -> str:
    """A folder with the tiny model's configuration and `values` in it."""
    config = json.loads((tiny_model / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")
    return str(folder)


# --- figures


def test_an_engines_own_policy_and_block(plugin: None, engine_args: Any, tiny: Any) -> None:
    config = engine_args(SETTINGS, max_model_len=None).create_engine_config()
    sizing = sized(tiny)
    assert sizing.policy == policy_of(config)
    assert sizing.block_size == config.cache_config.block_size == BLOCK_SIZE
    assert sizing.max_model_len == config.model_config.max_model_len
    assert sizing.block_bytes == BLOCK_BYTES


def test_without_settings_the_servers_defaults(tiny: Any) -> None:
    policy = sized(tiny, {}).policy
    assert (policy.sink, policy.window, policy.max_source_len) == (4, 2048, 0)


def test_the_start_up_line(tiny: Any) -> None:
    sizing = sized(tiny, memory=40 * BLOCK_BYTES)
    assert sizing.slots is not None
    line = START_UP_LINE.fullmatch(str(sizing.slots))
    assert line is not None
    assert line["slot_bytes"] == f"{6 * BLOCK_BYTES:,}"
    assert (line["sink"], line["window"], line["slot_blocks"]) == ("96", "96", "6")
    assert (line["slots_total"], line["pool_blocks"]) == ("6", "39")
    assert (line["source_blocks"], line["max_pinned_blocks"]) == ("3", "3")
    assert line["positions"] == "rebase, falling back at 768"


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize(("sink", "window", "source"), [(0, 1, 0), (4, 1020, 0), (5, 96, 700)])
def test_a_slot(tiny: Any, sink: int, window: int, source: int, block_size: int) -> None:
    settings = {"sink": sink, "window": window, "max_source_len": source}
    figures = sized(tiny, settings, block_size=block_size, streams=3).to_dict()
    blocks = -(-(max(sink, source) + window) // block_size)
    shared = max(sink, source) // block_size
    block_bytes = ENTRY_BYTES * block_size
    assert figures["entry_bytes"] == ENTRY_BYTES == TINY.num_layers * figures["layer_entry_bytes"]
    assert (figures["slot_blocks"], figures["source_blocks"]) == (blocks, shared)
    assert figures["slot_bytes"] == blocks * block_bytes
    assert figures["streams_bytes"] == 3 * blocks * block_bytes
    assert figures["streams_bytes_one_source"] == (shared + 3 * (blocks - shared)) * block_bytes


def test_full_attention(tiny: Any) -> None:
    rows = sized(tiny, streams=7).to_dict()["full_attention"]
    assert [row["tokens"] for row in rows] == [8192, 10_000, 100_000]
    for row in rows:
        blocks = -(-row["tokens"] // BLOCK_SIZE)
        assert row["stream_bytes"] == blocks * BLOCK_BYTES
        assert row["streams_bytes"] == 7 * blocks * BLOCK_BYTES


@pytest.mark.parametrize(("num_workers", "times"), [(1, 1), (2, 1), (4, 2)])
def test_workers_hold_their_heads(tiny: Any, num_workers: int, times: int) -> None:
    """Of two KV heads; four workers hold each twice. Memory is each worker's."""
    sizing = sized(tiny, num_workers=num_workers, memory=40 * BLOCK_BYTES)
    assert sizing.block_bytes == times * BLOCK_BYTES
    assert sizing.slots is not None
    assert sizing.slots.pool_blocks == 40 * num_workers // times - 1


@pytest.mark.parametrize(("dtype", "times"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_dtypes(tiny_model: Path, dtype: str, times: int) -> None:
    sizing = sized(model_config(str(tiny_model), dtype))
    assert sizing.dtype == dtype
    assert sizing.block_bytes == BLOCK_BYTES * times // 4


def test_settings_in_the_models_configuration(tiny_model: Path, tmp_path: Path) -> None:
    declared = {"sink": 9, "window": 64, "max_slots": 2, "max_pinned_blocks": 1}
    folder = changed(tiny_model, tmp_path, bounded_kv=declared)
    model = model_config(f"{folder}/config.json", "float32")
    sizing = sized(model, {"window": 32}, memory=20 * BLOCK_BYTES)
    assert (sizing.policy.sink, sizing.policy.window) == (9, 32)
    assert sizing.slots is not None
    assert (sizing.slots.num_slots, sizing.slots.max_pinned_blocks) == (2, 1)


def test_streams_are_what_the_memory_holds(tiny: Any) -> None:
    assert sized(tiny).streams == 1
    assert sized(tiny, memory=40 * BLOCK_BYTES).streams == 6
    assert sized(tiny, memory=40 * BLOCK_BYTES, streams=2).streams == 2


def test_more_streams_than_the_memory_holds(tiny: Any) -> None:
    """A pool of 39: 6 slots of 6 blocks, or 3 blocks of a source and 12 times 3 of their own."""
    text = str(sized(tiny, memory=40 * BLOCK_BYTES, streams=20))
    assert "the memory holds 6, the others wait (12 where all share one source)" in text
    assert "wait" not in str(sized(tiny, memory=40 * BLOCK_BYTES, streams=6))


# --- dividing a pool


def test_slots_are_what_the_least_allows() -> None:
    policy = EnginePolicy(sink=0, window=64, max_source_len=32, positions="absolute")

    def slots(pool_blocks: int, max_active: int | None = None, **more: Any) -> tuple[int, int]:
        asked = EnginePolicy.from_mapping({**policy.to_mapping(), **more})
        pool = {"block_size": 32, "block_bytes": 1, "pool_blocks": pool_blocks}
        divided = divide(asked, **pool, max_active=max_active)
        return divided.num_slots, divided.max_pinned_blocks

    assert slots(10) == (3, 1)
    assert slots(10, max_active=2) == (2, 4)
    assert slots(10, max_slots=1) == (1, 7)
    assert slots(10, max_pinned_blocks=2) == (2, 2)
    assert slots(10, max_source_len=31) == (3, 0)  # fills no block
    with pytest.raises(PolicyError, match=r"--bounded-kv-max-slots=4: needs 12 blocks .* has 10"):
        slots(10, max_slots=4)
    with pytest.raises(PolicyError, match=r"--bounded-kv-max-pinned-blocks=8: needs 3 .* has 10"):
        slots(10, max_pinned_blocks=8)
    with pytest.raises(PolicyError, match=r"--bounded-kv-window=64: needs 3 blocks .* has 2"):
        slots(2)


def test_memory_for_less_than_a_slot() -> None:
    policy = EnginePolicy(sink=4, window=60, positions="absolute")
    assert blocks_in(30, policy, block_size=32, block_bytes=10) == 2
    with pytest.raises(PolicyError, match=r"sink \+ window=64: needs 3 blocks .*holds 2; lower"):
        blocks_in(29, policy, block_size=32, block_bytes=10)


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"sink": -1}, {}, "sink=-1: must be >= 0"),
        ({"window": 0}, {}, "window=0: must be >= 1"),
        ({"max_source_len": -5}, {}, "max_source_len=-5: must be >= 0"),
        ({"window": 9000}, {}, r"sink \+ window=9004: is larger than max_model_len=8192"),
        ({}, {"block_size": 0}, "--block-size=0: must be >= 1"),
        ({}, {"streams": 0}, "--streams=0: must be >= 1"),
        ({}, {"num_workers": 0}, "--tensor-parallel-size=0: must be >= 1"),
        ({}, {"num_workers": 3}, "--tensor-parallel-size=3: must divide the model's 4 attention"),
        ({}, {"memory": 10 * BLOCK_BYTES}, r"sink \+ window=2052: needs 66 blocks .*holds 10"),
    ],
)
def test_bad_values(
    tiny: Any, settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sized(tiny, settings, **options)


def test_heads_that_cannot_be_divided(tiny_model: Path, tmp_path: Path) -> None:
    heads = {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 3}
    folder = changed(tiny_model, tmp_path, **heads)
    with pytest.raises(PolicyError, match=r"=2: must divide the model's 3 KV heads"):
        sized(model_config(folder), num_workers=2)


def test_models_of_other_kinds(tiny_model: Path, tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    folder = changed(tiny_model, tmp_path, **mistral, sliding_window=64)
    with pytest.raises(ValueError, match=r"--kv-plugin bounded .* it uses sliding-window layers\."):
        sized(model_config(folder))
    latent = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    folder = changed(tiny_model, tmp_path, **latent, kv_lora_rank=16, qk_rope_head_dim=8)
    with pytest.raises(ValueError, match=r"does not support multi-head latent attention \(MLA\)"):
        sized(model_config(folder))


def test_layers_that_differ(tiny: Any) -> None:
    config = SimpleNamespace(**vars(tiny.hf_config), is_heterogeneous=True)
    pretending = SimpleNamespace(hf_config=config)
    names = ("hf_text_config", "use_mla", "is_encoder_decoder", "runner_type", "is_attention_free")
    names += ("is_hybrid", "is_mm_prefix_lm", "uses_alibi", "model_arch_config", "max_model_len")
    names += ("get_total_num_kv_heads", "get_sliding_window", "get_num_kv_heads", "get_head_size")
    names += ("architectures", "model_impl", "uses_mrope", "dtype", "has_noops")
    names += ("get_total_num_hidden_layers",)
    for name in names:
        setattr(pretending, name, getattr(tiny, name))
    with pytest.raises(ValueError, match="layers differ from each other"):
        sized(pretending)
    config.is_heterogeneous = False
    assert sized(pretending).to_dict() == sized(tiny).to_dict()


def declared(window: int | None = None, alibi: bool = False, **text: Any) -> Any:
    return SimpleNamespace(
        hf_text_config=SimpleNamespace(**text),
        uses_alibi=alibi,
        get_sliding_window=lambda: window,
    )


@pytest.mark.parametrize(
    "model",
    [
        declared(),
        declared(layer_types=["full_attention"] * 2),
        declared(window=64, layer_types=["full_attention"] * 2),  # no layer uses it
        declared(layer_types=["sliding_attention"] * 2),  # of no width: switched off
    ],
)
def test_control_layers_that_can_be_bounded(model: Any) -> None:
    check_declared_layers(model)


@pytest.mark.parametrize(
    ("model", "feature"),
    [
        (declared(alibi=True), "ALiBi slopes"),
        (declared(attn_logit_softcapping=50.0), "a logits soft cap"),
        (declared(window=64), "sliding-window layers"),
        (declared(window=64, layer_types=["sliding_attention"] * 2), "sliding-window layers"),
        (declared(layer_types=["full_attention", "sliding_attention"]), "sliding-window layers"),
        (declared(layer_types=["chunked_attention"] * 2), "layers of type chunked_attention"),
        (declared(num_kv_shared_layers=2), "cross-layer KV sharing"),
    ],
)
def test_declared_layers_that_cannot_be_bounded(model: Any, feature: str) -> None:
    with pytest.raises(ValueError, match=f"does not support this model: it uses {feature}"):
        check_declared_layers(model)


def test_models_that_are_not_there(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model, message in {
        str(tmp_path): "has no config.json; give the folder",
        str(tiny_model / "tokenizer.json"): "is a file of another name than config.json",
        "nobody/no-such-model": "is no folder here, .*check the name, unset HF_HUB_OFFLINE",
    }.items():
        with pytest.raises(ModelError, match=message):
            model_config(model)


def test_a_configuration_that_vllm_does_not_take(tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path, architectures=["NoSuchModel"])
    with pytest.raises(ModelError, match=r"vLLM does not take it: .*NoSuchModel"):
        model_config(folder)
    folder = changed(tiny_model, tmp_path, num_attention_heads=12)
    with pytest.raises(ModelError, match=r"vLLM does not take it: .*hidden size \(128\)"):
        model_config(folder)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="vLLM does not take it: "):
        model_config(folder)


# --- the command


def test_the_command(tiny_model: Path, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sink", "5", "--window", "96", "--max-source-len", "96", "--dtype", "float32"]
    options += ["--memory", str(40 * BLOCK_BYTES), "--block-size", "64", "--streams", "2"]
    options += ["--tensor-parallel-size", "2"]
    expected = sizing_of(
        tiny,
        SETTINGS,
        name=str(tiny_model),
        block_size=64,
        num_workers=2,
        memory=40 * BLOCK_BYTES,
        streams=2,
    )
    assert main(["size", str(tiny_model), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected.to_dict()
    assert main(["size", str(tiny_model), *options]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_what_is_printed(tiny: Any) -> None:
    text = str(sized(tiny, memory=40 * BLOCK_BYTES))
    for line in (
        "model         3 layers, 2 KV heads of 32, float32, 8,192 tokens",
        "an entry      512 bytes a layer, 1,536 in all 3",
        "a block       32 entries, 49,152 bytes",
        "a slot        sink 96 + window 96 entries in 6 blocks, 294,912 bytes (288.0 KiB)",
        "a source      3 blocks can be shared, 147,456 bytes",
        "memory        1.9 MiB: 6 slots in a pool of 39 blocks",
        "6 streams     1.7 MiB at any length, 1,008.0 KiB where all share one source",
        "at 8,192 tokens             12.0 MiB        72.0 MiB",
    ):
        assert line in text.splitlines()


def test_errors_of_the_command(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(tiny_model), "--window", "0"]) == 2
    assert "bounded-kv size: error: window=0: must be >= 1" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["size", str(tiny_model), "--memory", "8 gigs"])
    assert ended.value.code == 2
    assert "argument --memory: '8 gigs': must be bytes, or a number with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5kib", 1536),
        ("8GB", 8 * 10**9),
        ("1TiB", 1 << 40),
        ("77", 77),
        ("77B", 77),
    ],
)
def test_memory(text: str, num_bytes: int) -> None:
    assert memory_of(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8G", "-1GiB", "8GiB!", "nan"])
def test_no_memory(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r}: must be bytes"):
        memory_of(text)


def test_readable() -> None:
    assert [readable(n) for n in (0, 1023, 1024, 5 << 40)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "5.0 TiB",
    ]
