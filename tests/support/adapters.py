"""Tiny random LoRA adapters, and the oracles of the models that they make."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.oracle_llama import OracleLlama

ALPHA = 8


def write_adapter(
    folder: Path, base: OracleLlama, seed: int, rank: int = 4
) -> tuple[Any, OracleLlama]:
    """An adapter of every projection, in PEFT's format, large enough to change what is said.

    Returns:
        vLLM's request for it, and the oracle of the base model with the adapter merged in.
    """
    from vllm.lora.request import LoRARequest

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    merged = dict(base.weights)
    for name, weight in base.weights.items():
        if "_proj" not in name:
            continue
        down = torch.randn(rank, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
        up = 0.3 * torch.randn(weight.shape[0], rank, generator=generator)
        module = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        merged[name] = weight + ALPHA / rank * (up.double() @ down.double())
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in merged if "_proj" in name}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    oracle = OracleLlama(base.config, merged, base.angle_dtype)
    return LoRARequest(f"adapter-{seed}", seed, str(folder)), oracle
