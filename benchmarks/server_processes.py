"""The processes of one server: what they hold, and which of them goes first."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import psutil

ENGINE_NAMES = ("EngineCore", "Worker")
ENGINE_NICENESS = 15


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def is_named(process: psutil.Process, *names: str) -> bool:
    """Whether its title or command line contains one of `names`."""
    title = " ".join(process.cmdline())
    return any(name in title for name in names)


def let_front_end_go_first(pid: int) -> None:
    """Lower the priority of the engines of the server `pid`.

    While requests run, vLLM's engine processes spin for work. On two cores they starve the API
    server for seconds, stock vLLM's as well, which would hide everything else.
    """
    for process in family(pid):
        if is_named(process, *ENGINE_NAMES):
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, ENGINE_NICENESS)


@dataclass(frozen=True)
class Usage:
    """What one process holds, and has used so far."""

    rss: int
    """Resident set, in bytes."""
    cpu_s: float
    """Processor time of all its threads, in seconds."""


def usage(pid: int) -> dict[str, Usage]:
    """Of every process of the server `pid`, by a short name and its id."""
    result = {}
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():  # may have ended
            times = process.cpu_times()
            name = f"{_short_name(process)} {process.pid}"
            result[name] = Usage(process.memory_info().rss, times.user + times.system)
    return result


def _short_name(process: psutil.Process) -> str:
    words = process.cmdline() or [process.name()]
    title = " ".join(words)
    for known, name in (
        ("EngineCore", "engine core"),
        ("ApiServer", "API server"),
        ("Worker", "worker"),
        ("resource_tracker", "resource tracker"),
        ("forkserver", "fork server"),
        (" serve ", "API server"),
    ):
        if known in title:
            return name
    return os.path.basename(words[0])
