"""Engine configurations that the bounded cache cannot serve: each is named, with a way out.

What flags on the tiny model reach is in `tests/http/test_start_up.py`. The rest takes
another model, device or vLLM build, so here a real config says of itself what those would.
"""

from __future__ import annotations

from typing import Any

import pytest

from vllm_bounded_kv.engine.policy import EnginePolicy, PolicyError
from vllm_bounded_kv.engine.refusals import UnsupportedError, check_engine, check_positions

STOCK = r"Serve this model without --kv-plugin\."
POLICY = EnginePolicy(window=60)


class Pretending:
    """A config of vLLM's in which some attributes, which it must have, say something else."""

    def __init__(self, real: Any, **said: Any) -> None:
        for name in said:
            assert hasattr(real, name), f"vLLM's {type(real).__name__} has no {name}"
        self.__dict__.update(said, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def config(plugin: None, engine_args: Any) -> Any:
    """Of a stock engine that could be a bounded one."""
    return engine_args(max_model_len=512).create_engine_config()


def pretending(config: Any, part: str, **said: Any) -> Any:
    return Pretending(config, **{part: Pretending(getattr(config, part), **said)})


def test_control_what_is_not_refused(config: Any) -> None:
    check_engine(config, POLICY)
    for dtype in ("auto", "float16", "bfloat16", "float32"):
        check_engine(pretending(config, "cache_config", cache_dtype=dtype), POLICY)
    check_engine(pretending(config, "parallel_config", tensor_parallel_size=4), POLICY)


@pytest.mark.parametrize(
    ("part", "said", "message"),
    [
        ("model_config", {"use_mla": True}, rf"multi-head latent attention \(MLA\)\. {STOCK}"),
        ("model_config", {"is_encoder_decoder": True}, rf"encoder-decoder models\. {STOCK}"),
        ("model_config", {"is_attention_free": True}, rf"models without attention\. {STOCK}"),
        ("model_config", {"is_hybrid": True}, rf"hybrid models with recurrent layers\. {STOCK}"),
        (
            "model_config",
            {"is_mm_prefix_lm": True},
            rf"models that attend images bidirectionally\. {STOCK}",
        ),
        ("model_config", {"runner_type": "draft"}, rf"--runner draft\. {STOCK}"),
        (
            "cache_config",
            {"cache_dtype": "int8_per_token_head"},
            r"quantised KV cache \(--kv-cache-dtype int8_per_token_head\)\. Use .* auto\.",
        ),
        (
            "parallel_config",
            {"decode_context_parallel_size": 2},
            r"--decode-context-parallel-size 2\. Use 1\.",
        ),
        (
            "parallel_config",
            {"prefill_context_parallel_size": 4},
            r"--prefill-context-parallel-size 4\. Use 1\.",
        ),
        (
            "parallel_config",
            {"data_parallel_size": 3},
            r"--data-parallel-size 3 yet\. Run one server a replica\.",
        ),
        (
            "parallel_config",
            {"pipeline_parallel_size": 3},
            r"--pipeline-parallel-size 3 yet\. Use --tensor-parallel-size\.",
        ),
        (
            "device_config",
            {"device_type": "cuda"},
            r"device 'cuda' yet\. .* the CPU backend is complete\.",
        ),
    ],
)
def test_refused(config: Any, part: str, said: dict[str, Any], message: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^--kv-plugin bounded does not support .*{message}"
    ):
        check_engine(pretending(config, part, **said), POLICY)


def test_the_v2_model_runner(config: Any) -> None:
    message = r"vLLM's V2 model runner yet\. Set VLLM_USE_V2_MODEL_RUNNER=0\."
    with pytest.raises(UnsupportedError, match=message):
        check_engine(Pretending(config, use_v2_model_runner=True), POLICY)


def test_decode_context_parallelism_asked_for_by_flags(plugin: None, engine_args: Any) -> None:
    args = engine_args({}, decode_context_parallel_size=2, tensor_parallel_size=4)
    with pytest.raises(UnsupportedError, match=r"--decode-context-parallel-size 2\. Use 1\."):
        args.create_engine_config()


def test_a_refused_engine_keeps_vllms_scheduler_and_worker(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever catches the refusal holds no half of a bounded config."""
    from vllm_bounded_kv.engine.plugin import _activate

    worker, scheduler = config.parallel_config.worker_cls, config.scheduler_config.scheduler_cls
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    config.additional_config = {"kv_plugin": "bounded"}
    with pytest.raises(UnsupportedError, match="device 'cuda'"):
        _activate(config)
    assert config.parallel_config.worker_cls == worker
    assert config.scheduler_config.scheduler_cls == scheduler


@pytest.mark.parametrize(
    ("field", "flag"), [("scheduler_cls", "scheduler"), ("worker_cls", "worker")]
)
def test_somebody_elses_scheduler_or_worker(
    plugin: None, engine_args: Any, field: str, flag: str
) -> None:
    args = engine_args({}, **{field: "theirs.Own"})
    with pytest.raises(PolicyError, match=f"--{flag}-cls='theirs.Own': cannot be combined with"):
        args.create_engine_config()


# --- positions


def with_rotary_positions(config: Any, table: int | None, max_model_len: int) -> Any:
    text = Pretending(config.model_config.hf_text_config, max_position_embeddings=table)
    return pretending(config, "model_config", hf_text_config=text, max_model_len=max_model_len)


@pytest.mark.parametrize(("table", "length"), [(512, 512), (512, 100), (None, 10**6)])
def test_lengths_within_the_rotary_positions(config: Any, table: int | None, length: int) -> None:
    check_positions(with_rotary_positions(config, table, length), POLICY)


def test_lengths_beyond_the_rotary_positions_are_refused_with_the_engine(config: Any) -> None:
    message = (
        r"^--max-model-len=513: is beyond the model's 512 rotary positions .*"
        r"--bounded-kv-positions absolute .*; use at most 512$"
    )
    with pytest.raises(PolicyError, match=message):
        check_engine(with_rotary_positions(config, 512, 513), POLICY)
