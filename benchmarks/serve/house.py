"""The peers' servers: started when they are first asked for, all ended at the end."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

from benchmarks.serve.client import AskError
from benchmarks.serve.measure import Measurement
from benchmarks.serve.peers import PEERS
from benchmarks.serve.prompts import Prompts
from benchmarks.serve.work import Work
from vllm_bounded_kv.launch import ServerError, VllmServer


class House:
    """A context manager that keeps servers, all of them at once or one at a time.

    A peer that did not start fails from then on for the same reason.
    """

    def __init__(self, work: Work, one_at_a_time: bool) -> None:
        self._work, self._one_at_a_time = work, one_at_a_time
        self._prompts = Prompts(work.model)
        self._servers: dict[str, VllmServer] = {}
        self._failed: dict[str, str] = {}

    def __enter__(self) -> House:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self._servers):
            self._servers.pop(name).stop()

    def measurement(self, name: str, number: int) -> Measurement:
        """Of a peer, which is started if it is not there; `number` chooses the prompts.

        Raises:
            AskError: when its server does not start.
        """
        if name in self._failed:
            raise AskError(self._failed[name])
        is_new = name not in self._servers
        if is_new:
            self._start(name)
        server = self._servers[name]
        assert server.process is not None
        found = Measurement(PEERS[name], server.url, server.process.pid, self._work, self._prompts)
        if is_new:
            asyncio.run(found.warm_up())
        self._prompts.begin(number)
        return found

    def _start(self, name: str) -> None:
        if self._one_at_a_time:
            self.__exit__(None, None, None)
        print(f"starting {name}: {PEERS[name].what}", file=sys.stderr, flush=True)
        try:
            server = PEERS[name].server(self._work)
            self._servers[name] = server.__enter__()
        except (ServerError, ValueError) as error:
            self._failed[name] = reason(str(error))
            raise AskError(self._failed[name]) from error


def reason(text: str) -> str:
    """The last line of a server's output that names an error, or its last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1][-300:]
