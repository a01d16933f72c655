"""Engine configurations that the bounded cache cannot serve: each is named, with a way out.

What flags on the tiny model reach is in `tests/http/test_start_up.py`. The rest takes
another model, device or vLLM build, so here a real config says of itself what those would.
"""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_bounded_kv.engine.policy import EnginePolicy, PolicyError
from vllm_bounded_kv.engine.refusals import UnsupportedError, check_engine, check_positions
from vllm_bounded_kv.engine.rope import rotary_of, why_not_rebase

STOCK = r"Serve this model without --kv-plugin\."
POLICY = EnginePolicy(window=60, positions="absolute")


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
    for dtype in ("auto", "float32"):
        check_engine(pretending(config, "cache_config", cache_dtype=dtype), POLICY)
    for field in ("tensor_parallel_size", "data_parallel_size"):
        check_engine(pretending(config, "parallel_config", **{field: 4}), POLICY)


def test_replicas_of_a_mixture_of_experts(config: Any) -> None:
    """vLLM keeps such replicas in step with each other, which nobody has tried."""
    several = pretending(config, "parallel_config", data_parallel_size=3)
    mixture = Pretending(config.model_config, is_moe=True)
    message = (
        r"--data-parallel-size 3 with mixture-of-experts models yet\. Run one server a replica"
    )
    with pytest.raises(UnsupportedError, match=message):
        check_engine(Pretending(several, model_config=mixture), POLICY)


def test_pipelines_that_compile(plugin: None, engine_args: Any) -> None:
    from vllm_bounded_kv.engine.plugin import WORKERS

    args = engine_args({}, pipeline_parallel_size=2, enforce_eager=False)
    assert args.create_engine_config().parallel_config.worker_cls == WORKERS["cpu"]


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
            r"quantised KV cache.* \(--kv-cache-dtype int8_per_token_head\)\. Use .* auto\.",
        ),
        (
            "cache_config",
            {"cache_dtype": "bfloat16"},
            r"of another dtype than the model's torch\.float32 \(--kv-cache-dtype bfloat16\)\.",
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
            # This config is of an eager engine.
            "parallel_config",
            {"pipeline_parallel_size": 3},
            r"--pipeline-parallel-size 3 with --enforce-eager .*\. Remove --enforce-eager, or use "
            r"--tensor-parallel-size\.",
        ),
        (
            "device_config",
            {"device_type": "xpu"},
            r"device 'xpu'\. Use a CPU or a CUDA GPU\.",
        ),
    ],
)
def test_refused(config: Any, part: str, said: dict[str, Any], message: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"^--kv-plugin bounded does not support .*{message}"
    ):
        check_engine(pretending(config, part, **said), POLICY)


def test_drafts_in_a_pipeline(plugin: None, engine_args: Any) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    args = engine_args({}, pipeline_parallel_size=2, enforce_eager=False, speculative_config=ngram)
    message = r"speculative decoding with --pipeline-parallel-size yet\. Remove one of the two\."
    with pytest.raises(UnsupportedError, match=message):
        args.create_engine_config()


@pytest.fixture
def gpu_config(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As vLLM would make it on a GPU, where its V2 runner is the default."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config.scheduler_config.async_scheduling = False
    return pretending(config, "device_config", device_type="cuda")


def test_control_what_is_not_refused_on_gpus(gpu_config: Any) -> None:
    check_engine(gpu_config, POLICY)


def test_the_v2_runner_is_for_gpus_and_the_v1_runner_for_cpus(
    config: Any, gpu_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"V2 model runner on CPUs.*RUNNER=0"):
        check_engine(config, POLICY)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UnsupportedError, match="V1 model runner on GPUs"):
        check_engine(gpu_config, POLICY)


@pytest.mark.parametrize(
    ("part", "said", "message"),
    [
        (
            "attention_config",
            {"backend": AttentionBackendEnum.FLASH_ATTN},
            r"another attention backend \(FLASH_ATTN\): it brings its own\. Remove --attention-",
        ),
        (
            "scheduler_config",
            {"async_scheduling": True},
            r"asynchronous scheduling on GPUs yet\. Use --no-async-scheduling\.",
        ),
        ("parallel_config", {"use_ubatching": True}, r"microbatches .*\. Remove the flag\."),
    ],
)
def test_refused_on_gpus(gpu_config: Any, part: str, said: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_engine(pretending(gpu_config, part, **said), POLICY)


def test_drafts_on_gpus(gpu_config: Any) -> None:
    drafting = Pretending(gpu_config, speculative_config=SimpleNamespace(method="ngram"))
    with pytest.raises(UnsupportedError, match=r"speculative decoding on GPUs yet\."):
        check_engine(drafting, POLICY)


@pytest.mark.parametrize("method", ["eagle", "draft_model", "ngram_gpu", "suffix"])
def test_drafts_that_are_not_looked_up(config: Any, method: str) -> None:
    drafting = Pretending(config, speculative_config=SimpleNamespace(method=method))
    message = rf"speculative decoding by {method} .*Its \"method\" can be \"ngram\"\."
    with pytest.raises(UnsupportedError, match=message):
        check_engine(drafting, POLICY)


def test_drafts_with_asynchronous_scheduling(config: Any) -> None:
    drafting = Pretending(config, speculative_config=SimpleNamespace(method="ngram"))
    check_engine(drafting, POLICY)
    message = r"speculative decoding with asynchronous scheduling yet\. Use --no-async-scheduling\."
    with pytest.raises(UnsupportedError, match=message):
        check_engine(pretending(drafting, "scheduler_config", async_scheduling=True), POLICY)


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
    monkeypatch.setattr(config.device_config, "device_type", "xpu")
    config.additional_config = {"kv_plugin": "bounded"}
    with pytest.raises(UnsupportedError, match="device 'xpu'"):
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
    return pretending(
        config,
        "model_config",
        hf_text_config=text,
        max_model_len=max_model_len,
        get_and_verify_max_len=lambda length: length,
    )


@pytest.mark.parametrize(("table", "length"), [(512, 512), (512, 100), (None, 10**6)])
def test_lengths_within_the_rotary_positions(config: Any, table: int | None, length: int) -> None:
    check_positions(with_rotary_positions(config, table, length), POLICY)


def test_lengths_beyond_the_rotary_positions_are_refused_with_the_engine(config: Any) -> None:
    message = (
        r"^--max-model-len=513: is beyond the model's 512 rotary positions .*"
        r"--bounded-kv-positions absolute .*; use at most 512, or rebase$"
    )
    with pytest.raises(PolicyError, match=message):
        check_engine(with_rotary_positions(config, 512, 513), POLICY)


def test_what_the_model_derives_for_itself_still_counts(config: Any) -> None:
    """Positions that do not fall back end where vLLM says that they do."""
    model = Pretending(config.model_config, max_model_len=10**6)
    text = Pretending(config.model_config.hf_text_config, max_position_embeddings=None)
    model.__dict__["hf_text_config"] = text
    with pytest.raises(ValueError, match=r"max_model_len .1000000. is greater than the derived"):
        check_positions(Pretending(config, model_config=model), POLICY)


# --- positions that fall back


def rebase_reason(config: Any, text: dict[str, Any] | None = None, **said: Any) -> str | None:
    model = config.model_config
    hf = SimpleNamespace(**{**vars(model.hf_text_config), **(text or {})})
    return why_not_rebase(Pretending(model, hf_text_config=hf, **said))


def test_control_a_llama_can_rebase(config: Any) -> None:
    assert rebase_reason(config) is None
    for kind in ("default", "llama3", "linear", "yarn"):
        assert rebase_reason(config, {"rope_parameters": {"rope_type": kind}}) is None


@pytest.mark.parametrize(
    ("text", "said", "reason"),
    [
        ({}, {"model_impl": "transformers"}, "--model-impl transformers"),
        ({}, {"use_mla": True}, "MLA"),
        ({}, {"uses_mrope": True}, "M-RoPE"),
        ({}, {"uses_alibi": True}, "ALiBi"),
        ({}, {"architectures": ["SmolLM3ForCausalLM"]}, "LlamaForCausalLM, .*not SmolLM3For"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, {}, "rope_type 'dynamic' is none of"),
        ({"rope_parameters": {"rope_type": "longrope"}}, {}, "rope_type 'longrope' is none of"),
        ({"rope_parameters": {"full_attention": {}}}, {}, "rotary embeddings of several kinds"),
        ({"llama_4_scaling": {"beta": 1}}, {}, "llama_4_scaling"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, {}, "dual chunk"),
        ({"max_position_embeddings": None}, {}, "no max_position_embeddings"),
    ],
)
def test_models_that_cannot_rebase_say_why(
    config: Any, text: dict[str, Any], said: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, rebase_reason(config, text, **said) or "")


class Model(torch.nn.Module):
    """Two attention layers with rotary embeddings of their parents'."""

    def __init__(self, *embeddings: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in embeddings)
        for layer, embedding in zip(self.layers, embeddings, strict=True):
            layer.attn = torch.nn.Module()
            layer.rotary_emb = embedding


def layer_names(model: Model) -> list[str]:
    return [f"layers.{i}.attn" for i in range(len(model.layers))]


def rotary_embedding(**rope: Any) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    with set_current_vllm_config(VllmConfig()):
        return get_rope(16, 512, True, parameters, torch.float32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(("rope", "rows"), [({}, 512), (YARN, 2048)])
def test_the_rotary_embedding_is_found(plugin: None, rope: dict[str, Any], rows: int) -> None:
    embedding = rotary_embedding(**rope)
    model = Model(embedding, embedding)
    rotary = rotary_of(model, layer_names(model), rows)
    assert rotary.is_neox and rotary.frequencies.shape == (8,)
    with pytest.raises(ValueError, match=f"rotary table has {rows} rows, not {rows + 1}"):
        rotary_of(model, layer_names(model), rows + 1)


def test_models_whose_layers_rotate_differently_are_refused(plugin: None) -> None:
    plain, yarn = rotary_embedding(), rotary_embedding(**YARN)
    remedy = "use --bounded-kv-positions absolute"
    for model, reason in (
        (Model(plain, yarn), "use 2 rotary embeddings"),
        (Model(plain, None), "use 2 rotary embeddings"),
        (Model(None, None), "have no rotary_emb beside them"),
        (Model(torch.nn.Linear(2, 2)), "rotary embedding is a Linear"),
    ):
        with pytest.raises(ValueError, match=f"{reason}.*{remedy}"):
            rotary_of(model, layer_names(model), 100)


def test_a_table_that_is_not_what_its_frequencies_give_is_refused(plugin: None) -> None:
    embedding = copy.deepcopy(rotary_embedding())
    embedding.base = 20000.0
    with pytest.raises(ValueError, match="not what its frequencies give"):
        rotary_of(Model(embedding), ["layers.0.attn"], 100)
