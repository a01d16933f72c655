"""The `vllm.general_plugins` entry point.

vLLM calls `register` in every process. It adds the flags and looks at engine configs as they are
made; unless one asks for `--kv-plugin bounded`, that is all that ever happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_bounded_kv.engine import cli, compat, extensions
from vllm_bounded_kv.engine.policy import PolicyError
from vllm_bounded_kv.engine.settings import policy_of, settle

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CPU_BLOCK_SIZE = 32
"""The smallest block that vLLM's fast CPU kernel takes: short sources can be shared, at a few
per cent of decode attention (vLLM's own default is 128)."""

SCHEDULER = "vllm_bounded_kv.engine.scheduler.BoundedScheduler"
ASYNC_SCHEDULER = "vllm_bounded_kv.engine.scheduler.BoundedAsyncScheduler"
WORKERS = {
    "cpu": "vllm_bounded_kv.engine.worker.BoundedCPUWorker",
    "cuda": "vllm_bounded_kv.engine.gpu_worker.BoundedGPUWorker",
}


def register() -> None:
    """Make `--kv-plugin bounded` known to vLLM. Safe to call any number of times."""
    compat.install_cli(cli.add_flags)
    compat.install_engine_config(_before_config, _activate)


def _before_config(args: Any) -> Callable[[], None]:
    """Settle what must be known before vLLM makes the config; returns how to undo it."""
    from vllm.platforms import current_platform

    compat.check_vllm_version()
    for name in ("scheduler_cls", "worker_cls"):
        if getattr(args, name) not in (None, "auto"):
            raise PolicyError(
                f"--{name.replace('_', '-')}",
                getattr(args, name),
                "cannot be combined with --kv-plugin bounded, which brings its own",
            )
    put_back = compat.lift_length_limit()
    block_size, is_async = args.block_size, args.async_scheduling
    if block_size is None and current_platform.is_cpu():
        args.block_size = CPU_BLOCK_SIZE
    if is_async is None and current_platform.is_cuda():
        args.async_scheduling = False  # see `refusals`

    def undo() -> None:
        args.block_size, args.async_scheduling = block_size, is_async
        put_back()

    return undo


def _activate(config: VllmConfig) -> None:
    """Turn a finished config into one of a bounded engine."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_bounded_kv.engine.endpoint import BoundedKVEndpoint
    from vllm_bounded_kv.engine.refusals import check_engine
    from vllm_bounded_kv.engine.requests import check_request, open_sessions, prepare_request

    assert isinstance(config.additional_config, dict)
    config.additional_config = settle(config.additional_config, config)
    policy = policy_of(config)
    assert policy is not None
    check_engine(config, policy)
    is_async = config.scheduler_config.async_scheduling
    config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER if is_async else SCHEDULER
    device = config.device_config.device_type
    config.parallel_config.worker_cls = WORKERS[device]
    if device == "cuda":
        config.attention_config.backend = AttentionBackendEnum.CUSTOM  # the worker registers it
    compat.install_front_end(check_request, prepare_request, open_sessions)
    compat.install_endpoint(BoundedKVEndpoint)
    compat.forget_sent_text()
    for extension in extensions.installed():
        extension.configure(config)
