"""What else `--kv-plugin bounded` brings along: entry points of `vllm_bounded_kv.extensions`.

So the plugin knows no server of ours, and a package on top of it needs no plugin of its own in
vLLM's sense, whose routes vLLM loads only where a variable of its environment names them.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Protocol

GROUP = "vllm_bounded_kv.extensions"


class Extension(Protocol):
    """What an entry point names."""

    title: str
    """Of its flags in `vllm serve --help`."""

    def add_flags(self, flag: Callable[..., None]) -> None:
        """Add flags to `vllm serve`: `flag(name, path, **argparse)` writes into vLLM's
        `additional_config` at `path`."""
        ...

    def configure(self, config: Any) -> None:
        """Complete a finished `VllmConfig` with the plugin turned on, in the process that made it.

        Raises:
            ValueError: for settings that will not do.
        """
        ...

    def attach_router(self, app: Any) -> None:
        """Add routes; as in vLLM's `EndpointPlugin`."""
        ...

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Make ready to serve them; as in vLLM's `EndpointPlugin`."""
        ...


@functools.cache
def installed() -> tuple[Extension, ...]:
    """All of them, in the order of their names."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in found)
