"""A model's configuration as vLLM reads it, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

CONFIG_NAME = "config.json"


class ModelError(ValueError):
    """There is no configuration of the model, or none that vLLM takes."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"MODEL={model!r}: {reason}")


def model_config(model: str, dtype: str = "auto") -> ModelConfig:
    """vLLM's configuration of a model.

    Args:
        model: a folder with a config.json, that file, or a name on the Hugging Face hub.
        dtype: as `vllm serve --dtype`.

    Raises:
        ModelError: saying what is missing, or what vLLM does not take.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.name != CONFIG_NAME:
            raise ModelError(model, f"is a file of another name than {CONFIG_NAME}")
        path = path.parent
    if path.is_dir():
        if not (path / CONFIG_NAME).is_file():
            raise ModelError(
                model, f"has no {CONFIG_NAME}; give the folder of a Hugging Face model"
            )
        return _as_vllm_reads_it(model, str(path), dtype)
    _fetch(model)
    return _as_vllm_reads_it(model, model, dtype)


def _fetch(model: str) -> None:
    """Have the hub's configuration in the cache."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(model, trust_remote_code=False)
    except OSError as error:
        raise ModelError(
            model,
            "is no folder here, and the hub's configuration of that name is neither cached nor to "
            f"be had ({_first_line(error)}); check the name, unset HF_HUB_OFFLINE, log in with "
            f"`hf auth login`, or give a folder with a {CONFIG_NAME}",
        ) from error
    except Exception:
        pass  # transformers does not know it, or finds it faulty; vLLM has the last word


def _as_vllm_reads_it(model: str, where: str, dtype: Any) -> ModelConfig:
    from pydantic import ValidationError

    try:
        from vllm.config import ModelConfig
    except ImportError as error:
        raise ModelError(
            model,
            f"vLLM is needed to read it, and cannot be imported ({error}); see `bounded-kv doctor`",
        ) from error
    try:
        return ModelConfig(model=where, dtype=dtype, skip_tokenizer_init=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ModelError(model, f"vLLM does not take it: {reason}") from error
    except Exception as error:  # of the classes that read it, each has errors of its own
        raise ModelError(model, f"vLLM does not take it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Of its message; with the next where it introduces that."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    num_lines = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:num_lines]).rstrip(".")
