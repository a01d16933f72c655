"""The front end's check of a request, before anything is promised to the client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_bounded_kv import metrics
from vllm_bounded_kv.engine.named_source import with_named_source
from vllm_bounded_kv.engine.policy import PolicyError
from vllm_bounded_kv.engine.sessions import Sessions
from vllm_bounded_kv.engine.settings import policy_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_request(config: VllmConfig, params: Any, num_prompt_tokens: int | None) -> None:
    """Refuse a request that the server's policy does not allow.

    Args:
        config: of the engine the request goes to; a stock engine allows everything.
        params: its `SamplingParams`.
        num_prompt_tokens: tokens of its prompt; `None` where that is not known yet.

    Raises:
        VLLMValidationError: which vLLM's server answers with HTTP 400.
    """
    policy = policy_of(config)
    if policy is None or params is None:
        return
    with _refusing():
        policy.for_request(params.extra_args, num_prompt_tokens)


def prepare_request(config: VllmConfig, prompt: Any, params: Any) -> tuple[Any, Any]:
    """Put the source that a request names in front of its prompt: see `named_source`.

    Raises:
        VLLMValidationError: as `check_request`.
    """
    if policy_of(config) is None or params is None:
        return prompt, params
    with _refusing():
        return with_named_source(prompt, params, config.model_config.max_model_len)


def open_sessions(config: VllmConfig) -> Sessions | None:
    """The limited sessions of a front end; `None` for a stock engine."""
    policy = policy_of(config)
    if policy is None:
        return None
    return Sessions(policy.max_sessions, policy.session_idle_s)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        from vllm.exceptions import VLLMValidationError

        metrics.count_refusal(error.field)
        raise VLLMValidationError(str(error), parameter=error.field, value=error.value) from error
