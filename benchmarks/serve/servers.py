"""Servers that are not `vllm serve`, started and ended as it is."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from vllm_bounded_kv.launch import VllmServer


class ModuleServer(VllmServer):
    """`python -m MODULE ... --port PORT` of this Python.

    Args:
        module: to run.
        flags: its arguments, without the port.
        threads: for OpenMP.
        ready: a path that answers 200 once it serves.
    """

    def __init__(
        self, module: str, flags: Sequence[str], threads: int, ready: str = "/health"
    ) -> None:
        super().__init__(module, env={"OMP_NUM_THREADS": str(threads)})
        self.command = [sys.executable, "-m", module, *flags, "--port", str(self.port)]
        self._ready = ready

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False
