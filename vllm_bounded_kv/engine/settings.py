"""Where the plugin's configuration lives: in vLLM's `additional_config`, which every process gets.

    {"kv_plugin": "bounded", "bounded_kv": {...}, "bounded_kv_config": "file.yaml"}

`settle` turns what the user wrote into one complete policy, once, when the engine config is made;
every process then reads that with `policy_of`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vllm_bounded_kv.engine.policy import ABSOLUTE, EnginePolicy, PolicyError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLUGIN_KEY = "kv_plugin"
POLICY_KEY = "bounded_kv"
FILE_KEY = "bounded_kv_config"
KNOWN_PLUGINS = ("bounded",)


def is_enabled(additional_config: Any) -> bool:
    """Whether the bounded cache is asked for.

    Raises:
        ValueError: for an unknown plugin name, or settings given without the plugin.
    """
    if not isinstance(additional_config, Mapping):
        return False
    name = additional_config.get(PLUGIN_KEY)
    if name is None:
        for key in (POLICY_KEY, FILE_KEY):
            if additional_config.get(key):
                raise PolicyError(
                    key, additional_config[key], "has no effect without --kv-plugin bounded"
                )
        return False
    if name not in KNOWN_PLUGINS:
        raise PolicyError("--kv-plugin", name, f"unknown plugin; known: {', '.join(KNOWN_PLUGINS)}")
    return True


def settle(additional_config: Mapping[str, Any], vllm_config: VllmConfig) -> dict[str, Any]:
    """The same config with a complete, checked policy in it.

    Later wins: the policy's own defaults, the model's `bounded_kv` (in its config.json), the
    file, the flags.
    """
    from vllm_bounded_kv.engine import rope  # needs torch, which a stock engine's flags do not

    model_config = vllm_config.model_config
    written: dict[str, Any] = {}
    for source in (
        getattr(model_config.hf_config, POLICY_KEY, None),
        _read_file(additional_config.get(FILE_KEY)),
        additional_config.get(POLICY_KEY),
    ):
        if source is None:
            continue
        if not isinstance(source, Mapping):
            raise PolicyError(POLICY_KEY, source, "must be a mapping of settings")
        for name in _replaced_by(source):
            written.pop(name, None)
        written.update(source)
    speculative = vllm_config.speculative_config
    num_draft_tokens = 0 if speculative is None else speculative.num_speculative_tokens
    if written.setdefault("num_draft_tokens", num_draft_tokens) != num_draft_tokens:
        raise PolicyError(
            "num_draft_tokens",
            written["num_draft_tokens"],
            "is not to be set: --speculative-config says it",
        )
    policy = EnginePolicy.from_mapping(written).resolve(
        model_config.max_model_len,
        rope.max_positions(model_config),
        rope.why_not_rebase(model_config),
    )
    settled = {k: v for k, v in additional_config.items() if k != FILE_KEY}
    settled[POLICY_KEY] = policy.to_mapping()
    return settled


def _replaced_by(source: Mapping[str, Any]) -> set[str]:
    """Settings of earlier sources that one of `source` makes meaningless."""
    replaced = set()
    if source.get("positions") == ABSOLUTE:
        replaced.add("position_limit")
    if source.get("retention") is not None:
        replaced |= {"sink", "window", "window_includes_step"}
    elif source.get("window") is not None:
        replaced.add("retention")
    return replaced


def policy_of(vllm_config: VllmConfig) -> EnginePolicy | None:
    """The settled policy of an engine; `None` for a stock engine."""
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping) or additional.get(PLUGIN_KEY) not in KNOWN_PLUGINS:
        return None
    return _settled_policy(**additional[POLICY_KEY])


@functools.lru_cache(maxsize=8, typed=True)
def _settled_policy(**values: Any) -> EnginePolicy:
    """Made once: front ends ask several times a request, and a retention callable is evaluated for
    every source length."""
    return EnginePolicy.from_mapping(values)


def _read_file(path: Any) -> Any:
    if not path:
        return None
    field = "--bounded-kv-config"
    if not isinstance(path, str | PathLike):
        raise PolicyError(field, path, "must be a path")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        values = json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise PolicyError(field, path, f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise PolicyError(field, path, f"is not valid YAML or JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise PolicyError(field, path, "must contain a mapping of settings")
    return values
