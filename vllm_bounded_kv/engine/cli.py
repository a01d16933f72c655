"""The command line: flags that write into `additional_config`, which reaches every process."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from vllm_bounded_kv.engine import compat, extensions
from vllm_bounded_kv.engine.policy import POSITION_MODES, EnginePolicy
from vllm_bounded_kv.engine.settings import FILE_KEY, KNOWN_PLUGINS, PLUGIN_KEY, POLICY_KEY

FLAGS_DEST = "bounded_kv_flags"
"""What the flags alone have written, beside vLLM's `additional_config`."""


class _WriteConfig(argparse.Action):
    """Store the value at `path` within `namespace.additional_config`."""

    def __init__(self, *args: Any, path: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = path

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        for parent in reversed(self.path):
            values = {parent: values}
        for dest in (FLAGS_DEST, "additional_config"):
            written = getattr(namespace, dest, None) or {}
            setattr(namespace, dest, compat.merged(written, values))


def _add_flag(group: Any, name: str, path: tuple[str, ...], **kwargs: Any) -> None:
    group.add_argument(name, action=_WriteConfig, path=path, default=argparse.SUPPRESS, **kwargs)


def add_flags(parser: Any) -> None:
    """Add `--kv-plugin` and `--bounded-kv-*` to vLLM's parser."""
    defaults = EnginePolicy()
    group = parser.add_argument_group(
        title="Bounded KV cache",
        description="A fixed KV cache per request: the stream's first `sink` entries and its last "
        "`window`. Needs --kv-plugin bounded.",
    )

    flag = functools.partial(_add_flag, group)
    flag(
        "--kv-plugin",
        (PLUGIN_KEY,),
        choices=KNOWN_PLUGINS,
        help="The KV cache plugin to serve with.",
    )
    flag(
        "--bounded-kv-config",
        (FILE_KEY,),
        metavar="FILE",
        help="YAML or JSON file with the settings below (without the prefix); flags override it.",
    )
    settings: dict[str, tuple[type, str]] = {
        "sink": (int, f"Entries kept from the start of a stream (default: {defaults.sink})."),
        "window": (
            int,
            "Most recent entries kept, the query's own included (default: 2048, or what fits "
            "within --max-model-len beside the sink).",
        ),
        "max_source_len": (
            int,
            "Longest source prefix a request may declare with kv_source_len "
            f"(default: {defaults.max_source_len}).",
        ),
        "max_slots": (int, "Streams admitted at once (default: what the pool holds)."),
        "max_pinned_blocks": (
            int,
            "Blocks that sources pinned through /v1/bounded_kv/sources may hold; slots are counted "
            "without them (default: what max_slots leaves of the pool).",
        ),
        "session_idle_s": (
            float,
            "Seconds without input after which a session is ended (default: never).",
        ),
        "max_sessions": (
            int,
            "Sessions open at once, for each API server; one more ends the one that has been idle "
            "longest (default: any number).",
        ),
        "retention": (
            str,
            "module:function that returns a SinkWindow for a source length, in place of sink "
            "and window.",
        ),
    }
    for name, (kind, text) in settings.items():
        flag(
            f"--bounded-kv-{name.replace('_', '-')}",
            (POLICY_KEY, name),
            type=kind,
            metavar=name.upper(),
            help=text,
        )
    flag(
        "--bounded-kv-positions",
        (POLICY_KEY, "positions"),
        choices=POSITION_MODES,
        help="How rotary positions follow the stream: its own, or falling back before the model's "
        "run out (default: rebase where the model supports it).",
    )
    flag(
        "--bounded-kv-position-limit",
        (POLICY_KEY, "position_limit"),
        type=int,
        metavar="POSITION_LIMIT",
        help="Where --bounded-kv-positions rebase falls back (default: four times sink + window, "
        "at most the model's max_position_embeddings).",
    )
    for extension in extensions.installed():
        others = parser.add_argument_group(title=extension.title)
        extension.add_flags(functools.partial(_add_flag, others))
    compat.merge_additional_config(parser, FLAGS_DEST)
