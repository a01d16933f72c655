"""Offline inference with a bounded cache: `python examples/offline.py`.

A batch of prompts far longer than the cache, and what the engine held for them.
"""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that we can look inside
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams

from vllm_bounded_kv.default_model import ensure_default_model

SINK, WINDOW = 4, 252


def main() -> None:
    """Generate, then show the cache."""
    llm = LLM(
        model=str(ensure_default_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=256 << 20,
        additional_config={
            "kv_plugin": "bounded",
            "bounded_kv": {"sink": SINK, "window": WINDOW},
        },
    )
    story = "The lighthouse keeper climbed the stairs and lit the lamp. " * 60
    prompts = [f"{story}\nThen {name}" for name in ("a ship", "the storm", "a stranger")]
    # A request may ask for less than the server allows.
    smaller = SamplingParams(max_tokens=40, temperature=0, extra_args={"kv_window": 100})
    params = [SamplingParams(max_tokens=40, temperature=0)] * 2 + [smaller]
    for output in llm.generate(prompts, params):
        print(f"{len(output.prompt_token_ids)} tokens in: ...{output.outputs[0].text!r}")
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    figures = scheduler.bounded_kv_figures()
    print(
        f"a slot is {figures['slot_blocks']} blocks ({figures['slot_bytes']:,} bytes); "
        f"rings started over {figures['ring_wraps']} times; "
        f"{figures['pool_blocks_free']} of {figures['pool_blocks']} blocks are free again"
    )


if __name__ == "__main__":
    main()
