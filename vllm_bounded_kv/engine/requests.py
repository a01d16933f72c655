"""The front end's check of a request, before anything is promised to the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_bounded_kv import metrics
from vllm_bounded_kv.engine.policy import PolicyError
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
    try:
        policy.for_request(params.extra_args, num_prompt_tokens)
    except PolicyError as error:
        from vllm.exceptions import VLLMValidationError

        metrics.count_refusal(error.field)
        raise VLLMValidationError(str(error), parameter=error.field, value=error.value) from error
