"""Every patch of vLLM and every version check. Nothing else in the project patches anything.

Each entry says why vLLM's official hooks do not reach, and when it can go. A patch whose target
vLLM renames fails at start-up, by name. All are idempotent; without `--kv-plugin bounded` only
the first two are applied, and they hand through.

Written against vLLM 0.32.0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

SUPPORTED_VLLM = "0.32"
MARK = "_bounded_kv_patch"
FIGURES_METHOD = "bounded_kv_figures"
"""The engine core's utility method that hands out `EngineFigures`."""
SESSIONS = "_bounded_kv_sessions"
"""Where an `AsyncLLM` keeps its `Sessions`."""
SOURCES_METHOD = "bounded_kv_sources"
"""The engine core's utility method about pinned sources: see `sources.handle`."""


def check_vllm_version() -> None:
    """Refuse a vLLM whose internals this release does not know.

    Raises:
        RuntimeError: naming the version found and the ones supported.
    """
    import vllm

    if not vllm.__version__.startswith(SUPPORTED_VLLM + "."):
        raise RuntimeError(
            f"--kv-plugin bounded supports vLLM {SUPPORTED_VLLM}.x, but vLLM {vllm.__version__} is "
            f"installed; install vllm=={SUPPORTED_VLLM}.0, or serve without --kv-plugin"
        )


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, once."""
    descriptor = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
    if descriptor is None:
        raise RuntimeError(
            f"vLLM no longer has {getattr(owner, '__name__', owner)}.{name}; "
            "this release of vllm-bounded-kv cannot work with it"
        )
    original = descriptor.__func__ if isinstance(descriptor, staticmethod) else descriptor
    if getattr(original, MARK, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, MARK, True)
    setattr(owner, name, staticmethod(wrapper) if original is not descriptor else wrapper)


def install_cli(add_flags: Callable[[Any], None]) -> None:
    """Patch: `EngineArgs.add_cli_args`. General plugins cannot add flags to `vllm serve`.

    Remove when vLLM lets plugins register arguments.
    """
    from vllm.engine.arg_utils import EngineArgs

    def make(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def add_cli_args(parser: Any) -> Any:
            parser = original(parser)
            add_flags(parser)
            return parser

        return add_cli_args

    _wrap(EngineArgs, "add_cli_args", make)


def install_engine_config(
    before: Callable[[Any], Callable[[], None]], after: Callable[[Any], None]
) -> None:
    """Patch: `EngineArgs.create_engine_config`. No hook lets a plugin inject its scheduler and
    worker from `additional_config`, nor check the finished config.

    Args:
        before: called with the `EngineArgs` when the plugin is asked for; returns a function that
            undoes what it changed.
        after: called with the finished `VllmConfig`.

    Remove when vLLM has a config hook for general plugins.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_bounded_kv.engine.settings import is_enabled

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_enabled(self.additional_config):
                return original(self, *args, **kwargs)
            undo = before(self)
            try:
                config = original(self, *args, **kwargs)
            finally:
                undo()
            after(config)
            return config

        return create_engine_config

    _wrap(EngineArgs, "create_engine_config", make)


def lift_length_limit() -> Callable[[], None]:
    """Let `max_model_len` exceed what the model derives for itself; returns how to undo it.

    No patch, but a variable of the environment, VLLM_ALLOW_LONG_MAX_MODEL_LEN, which vLLM reads
    through a cache of its own. The plugin decides by itself how long a stream may be, once the
    config is made (`refusals.check_positions`).
    """
    from vllm import envs

    name = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    previous, cached = os.environ.get(name), envs._is_envs_cache_enabled()
    envs.disable_envs_cache()
    os.environ[name] = "1"

    def undo() -> None:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
        if cached:
            envs.enable_envs_cache()

    return undo


def install_front_end(
    check: Callable[[Any, Any, int | None], None],
    prepare: Callable[[Any, Any, Any], tuple[Any, Any]],
    sessions_of: Callable[[Any], Any],
) -> None:
    """Patch: `InputProcessor.process_inputs`, `AsyncLLM.generate` and
    `AsyncLLM._add_streaming_input_request`. Requests that the policy
    refuses must get a 400 before a stream starts; vLLM has no validation hook for extra
    arguments, and checks a streamed request only after its status has gone out (`generate` is an
    async generator: nothing of it runs before the first token is awaited). A session's prompt
    arrives in pieces, behind a stand-in of one token; vLLM never ends one that falls silent.

    Args:
        check: called with the `VllmConfig`, the params and the number of prompt tokens (`None`
            where the prompt is still to come).
        prepare: called with the `VllmConfig`, a rendered prompt and the params; returns the two
            that take their place.
        sessions_of: called with the `VllmConfig`; returns the `Sessions` of a new front end;
            `None` for a stock engine.

    Remove when vLLM validates `extra_args` through a plugin hook, before it streams.
    """
    from vllm.exceptions import GracefulHTTPError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    def make_process(original: Callable[..., Any]) -> Callable[..., Any]:
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            num_tokens = None if _in_session.get() else _num_prompt_tokens(request)
            check(self.vllm_config, request.sampling_params, num_tokens)
            return request

        return process_inputs

    def make_generate(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(
            self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
        ) -> Any:
            prompt, sampling_params = prepare(self.vllm_config, prompt, sampling_params)
            check(self.vllm_config, sampling_params, _num_prompt_tokens(prompt))
            return original(self, prompt, sampling_params, *args, **kwargs)

        return generate

    def make_session(original: Callable[..., Any]) -> Callable[..., Any]:
        async def _add_streaming_input_request(
            self: Any, request_id: Any, input_stream: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not hasattr(self, SESSIONS):
                setattr(self, SESSIONS, sessions_of(self.vllm_config))
            sessions = getattr(self, SESSIONS)
            token = _in_session.set(True)  # the task that reads the pieces inherits it
            try:
                if sessions is None:
                    return await original(self, request_id, input_stream, *args, **kwargs)
                try:
                    session = sessions.open()
                except ValueError as error:
                    raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from error
                try:
                    pieces = session.pieces(input_stream, sessions.idle_s)
                    queue = await original(self, request_id, pieces, *args, **kwargs)
                    sessions.admit(session)
                except BaseException:
                    sessions.close(session)
                    raise
            finally:
                _in_session.reset(token)
            put = queue.put

            def put_and_note(output: Any) -> None:
                session.on_output(output)
                put(output)

            queue.put = put_and_note
            queue._input_stream_task.add_done_callback(lambda _: sessions.close(session))
            return queue

        return _add_streaming_input_request

    _wrap(InputProcessor, "process_inputs", make_process)
    _wrap(AsyncLLM, "generate", make_generate)
    _wrap(AsyncLLM, "_add_streaming_input_request", make_session)


_in_session: ContextVar[bool] = ContextVar("bounded_kv_in_session", default=False)
"""Whether an input is a piece of a session's, none of which need contain the declared source."""


def _num_prompt_tokens(prompt: Any) -> int | None:
    """Length of a rendered prompt or engine request; `None` where it is not known yet."""

    def part(name: str) -> Any:
        return prompt.get(name) if isinstance(prompt, Mapping) else getattr(prompt, name, None)

    for name in ("prompt_token_ids", "prompt_embeds"):
        if part(name) is not None:
            return len(part(name))
    return None


def install_engine_core_hooks() -> None:
    """Patch: `EngineCore.preprocess_add_request` and two new methods on `EngineCore`.

    The first: a request that passed no front end (or another one) and breaks the policy must fail
    alone; an exception in `Scheduler.add_request` would end the engine. The others: front ends
    call engine methods by name (`call_utility`); figures are made and sources are pinned here.

    Remove when schedulers can refuse requests and publish utility methods.
    """
    from vllm.v1.engine.core import EngineCore

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def preprocess_add_request(self: Any, request: Any) -> Any:
            prepared = original(self, request)
            check = getattr(self.scheduler, "request_policy", None)
            if check is not None and prepared[0].request_id not in self.scheduler.requests:
                check(prepared[0])
            return prepared

        return preprocess_add_request

    _wrap(EngineCore, "preprocess_add_request", make)

    def bounded_kv_figures(self: Any, mark_read: bool = False) -> dict[str, Any]:
        figures: dict[str, Any] = self.scheduler.bounded_kv_figures(mark_read)
        return figures

    def bounded_kv_sources(self: Any, action: str, values: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.scheduler.bounded_kv_sources(
            action, values, self.request_block_hasher
        )
        return answer

    setattr(EngineCore, FIGURES_METHOD, bounded_kv_figures)
    setattr(EngineCore, SOURCES_METHOD, bounded_kv_sources)


def install_endpoint(make_plugin: Callable[[], Any]) -> None:
    """Patch: `vllm.plugins.load_endpoint_plugins`. vLLM loads an endpoint plugin only when
    VLLM_PLUGINS names it, and a set VLLM_PLUGINS then filters every other plugin group too;
    `--kv-plugin bounded` is consent enough for its own route.

    Remove when endpoint plugins can be turned on by a flag.
    """
    import vllm.plugins

    def make(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def load_endpoint_plugins(supported_tasks: Any = None) -> list[Any]:
            plugins = original(supported_tasks)
            plugin = make_plugin()
            if set(plugin.required_tasks) & set(supported_tasks or ()):
                plugins.append(plugin)
            return plugins

        return load_endpoint_plugins

    _wrap(vllm.plugins, "load_endpoint_plugins", make)


def forget_sent_text() -> None:
    """Patch: `BaseIncrementalDetokenizer.get_next_output_text`. The API server keeps the text of a
    whole stream and copies it for each token (`self.output_text += ...`): 0.02 ms a token at
    100,000 tokens, 1 to 3 ms at a million, where each copy is memory mapped anew. A stream that
    sends only what is new needs the text not sent yet, and before it what a stop string may span.

    Remove when vLLM forgets it too.
    """
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    def make(original: Callable[..., str]) -> Callable[..., str]:
        def get_next_output_text(self: Any, finished: bool, delta: bool) -> str:
            text = original(self, finished, delta)
            if delta:
                reach = max(map(len, self.stop), default=0)
                sent = self._last_output_text_offset - reach
                if sent > 0:
                    self.output_text = self.output_text[sent:]
                    self._last_output_text_offset -= sent
            return text

        return get_next_output_text

    _wrap(BaseIncrementalDetokenizer, "get_next_output_text", make)


def drain_notifications() -> None:
    """Patch: `SpinCondition.record_read`. A process that reads its queue often never looks at the
    socket that would wake it, yet each message written to the queue sends it a command, and ZeroMQ
    keeps commands until somebody looks, `ZMQ_CONFLATE` or not (its issue 3171): an engine and its
    workers grow by 64 bytes a step each for as long as they are never idle. Asking the socket for
    its events takes them, in microseconds, and leaves the notification itself.

    Remove when vLLM's readers look at the socket under load.
    """
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def record_read(self: Any) -> None:
            original(self)
            self.local_notify_socket.getsockopt(zmq.EVENTS)

        return record_read

    _wrap(SpinCondition, "record_read", make)


def leave_rows_without_adapter_alone() -> None:
    """Patch: `bgmv_shrink`, `bgmv_expand` and `bgmv_expand_slice` of the CPU's LoRA operations. A
    row of the base model has adapter -1, which they take for the last adapter in the batch's
    table: whoever asks for the base model beside others' adapters gets one of theirs (vLLM's pull
    requests 48421 and 49656). What such rows contribute is made zero.

    Remove when vLLM's `lora_ops` skips rows of adapter -1.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def bgmv(
            inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **kwargs: Any
        ) -> None:
            without = indices < 0
            if without.any():
                inputs = inputs.masked_fill(without[:, None], 0)
            original(inputs, weights, output, indices, *args, **kwargs)

        return bgmv

    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        for owner in (lora_ops, punica_cpu):  # the latter has names of its own for them
            _wrap(owner, name, make)


def rewind_cpu_generators(runner: Any) -> None:
    """Patch: one CPU runner's `_sample` and `_bookkeeping_sync`. A request with a seed samples a
    token after each chunk of its prompt, which is discarded; vLLM then moves its generator back by
    an offset, which CPU generators do not have: `RuntimeError`, and the engine ends. Long prompts
    are what bounded streams are for. So those generators are put back here, and kept from vLLM's
    own attempt.

    Remove when vLLM can rewind CPU generators.
    """
    for name in ("_sample", "_bookkeeping_sync"):
        if not hasattr(runner, name):
            raise RuntimeError(f"vLLM no longer has {type(runner).__name__}.{name}")
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def discarded() -> dict[int, Any]:
        mask = runner.discard_request_mask.np
        return {i: g for i, g in runner.input_batch.generators.items() if mask[i]}

    def _sample(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in discarded().values()]
        output = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(*args: Any, **kwargs: Any) -> Any:
        hidden = discarded()
        for index in hidden:
            del runner.input_batch.generators[index]
        try:
            return bookkeep(*args, **kwargs)
        finally:
            runner.input_batch.generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync


@contextmanager
def cpu_attention_backend(backend: type) -> Iterator[None]:
    """While a model loads, its attention layers get `backend` for the CPU.

    No patch, but global state of vLLM's: `CpuPlatform` honours only an override of `CPU_ATTN`,
    and the choice is cached by configuration. Both are put back, so that another engine in this
    process gets its own backend.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import (
        _ATTN_OVERRIDES,
        AttentionBackendEnum,
        register_backend,
    )

    name = AttentionBackendEnum.CPU_ATTN
    previous = _ATTN_OVERRIDES.get(name)
    register_backend(name, f"{backend.__module__}.{backend.__qualname__}")
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        name.clear_override()
        if previous is not None:
            register_backend(name, previous)
        selector._cached_get_attn_backend.cache_clear()


def give_positions(model_state: Any, positions: Any) -> None:
    """Patch: one V2 runner's `ModelState`. The model gets its rotary positions from `positions`
    `[max_tokens]` instead of the runner's own, which the sampler needs as they are: it draws
    random numbers by them. Not run on a GPU yet.

    Remove when a `ModelState` can be chosen from outside of the model.
    """
    prepare, prepare_dummy = model_state.prepare_inputs, model_state.prepare_dummy_inputs

    def prepare_inputs(input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(input_batch, req_states)
        return {**inputs, "positions": positions[: input_batch.num_tokens_after_padding]}

    def prepare_dummy_inputs(num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare_dummy(num_reqs, num_tokens)
        return {**inputs, "positions": positions[:num_tokens]}

    model_state.prepare_inputs = prepare_inputs
    model_state.prepare_dummy_inputs = prepare_dummy_inputs


def merge_additional_config(parser: Any, flags_dest: str) -> None:
    """Keep what the plugin's flags have written when `--additional-config` comes after them.

    Without this the later of the two would replace the other. Where both set the same thing the
    flag wins, in any order.

    Args:
        parser: vLLM's, with its own arguments in it.
        flags_dest: where in the namespace the flags keep a copy of what they wrote.

    Remove together with `install_cli`.
    """
    for action in parser._actions:
        if action.dest == "additional_config" and not hasattr(action, MARK):
            action_type = type(action)

            class Merging(action_type):  # type: ignore[valid-type,misc]
                def __call__(self, parser: Any, namespace: Any, values: Any, *rest: Any) -> None:
                    super().__call__(parser, namespace, values, *rest)
                    flags = getattr(namespace, flags_dest, None)
                    written = getattr(namespace, self.dest)
                    if flags and isinstance(written, Mapping):
                        setattr(namespace, self.dest, merged(written, flags))

            action.__class__ = Merging
            setattr(action, MARK, True)


def merged(config: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with `flags` put in, mapping by mapping."""
    result = dict(config)
    for key, value in flags.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = merged(inner, value)
        result[key] = value
    return result
