"""Start `vllm serve` as a child process, wait until it is healthy, and end it for certain.

For the demo, the benchmarks and the tests of whole servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


class ServerError(RuntimeError):
    """`vllm serve` did not start."""

    def __init__(self, message: str) -> None:
        super().__init__(f"vllm serve did not start: {message}")


def vllm_command() -> str:
    """vLLM's own command: that beside this Python, or else the shell's."""
    vllm = Path(sys.executable).with_name("vllm")
    return str(vllm) if vllm.exists() else "vllm"


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer:
    """One `vllm serve`, as a context manager. `url` is its address once it is entered.

    Args:
        model: folder or hub name.
        flags: further arguments of `vllm serve`.
        env: variables to set for it.
        on_wait: called about twice a second while it starts, with the seconds so far.

    Raises:
        ServerError: when it does not become healthy; the message ends with its last output.
    """

    def __init__(
        self,
        model: str | Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            vllm_command(),
            *("serve", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
            *flags,
        ]
        self.env = {
            **os.environ,
            "VLLM_NO_USAGE_STATS": "1",
            # An in-process engine (the tests' setting) would block the server's event loop.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            **(env or {}),
        }
        self.on_wait = on_wait
        self.process: subprocess.Popen[bytes] | None = None
        self._log_file = tempfile.NamedTemporaryFile(  # noqa: SIM115  (lives as long as we do)
            prefix="vllm-serve-", suffix=".log"
        )

    @property
    def log(self) -> str:
        """Everything the server has printed."""
        return Path(self._log_file.name).read_text(encoding="utf-8", errors="replace")

    def __enter__(self) -> VllmServer:
        self.process = subprocess.Popen(
            self.command,
            env=self.env,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and every process it started."""
        process = self.process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        # Engine processes that outlived it share its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.process = None

    def _wait_until_healthy(self) -> None:
        assert self.process is not None
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            if self.process.poll() is not None:
                raise ServerError(
                    f"vllm serve ended with {self.process.returncode}:\n{self._tail()}"
                )
            if elapsed > START_TIMEOUT_S:
                raise ServerError(
                    f"vllm serve is not healthy after {elapsed:.0f} s:\n{self._tail()}"
                )
            if self._is_healthy():
                return
            if self.on_wait is not None:
                self.on_wait(elapsed)
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _tail(self, num_chars: int = 4000) -> str:
        return self.log[-num_chars:]
