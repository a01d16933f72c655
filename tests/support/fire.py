"""What clients do to a server that mean no good, or know no better: the same each time."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from vllm_bounded_kv.launch import VllmServer


@dataclass(frozen=True)
class Scale:
    """How much of it: `make test` has the short form, `make torture` the long one."""

    aborts: int
    rounds: int
    """Of a crowd."""
    slow_readers: int
    slow_s: float
    """That they keep at it."""
    examples: int
    """For each operation of the OpenAPI document."""
    big_bytes: int
    times: int
    """That each malformed request is sent."""


SHORT = Scale(60, 1, 4, 2.0, 3, 8_000_000, 1)
LONG = Scale(1000, 5, 16, 20.0, 40, 50_000_000, 10)

AT_ONCE = 16


def leave_at_random(
    url: str, path: str, body: Callable[[int], dict[str, Any]], count: int, headers: dict[str, str]
) -> int:
    """Ask `count` times, and go before the answer, on its way, or while waiting in a queue.

    Returns:
        How many had begun to be answered.
    """
    rng = random.Random(0)
    plans = [(rng.uniform(0.01, 1.5), rng.randrange(30)) for _ in range(count)]

    def leave(i: int) -> bool:
        seconds, parts = plans[i]
        begun = False
        with (
            contextlib.suppress(httpx.HTTPError, StopIteration),
            httpx.stream(
                "POST", url + path, json=body(i), headers=headers, timeout=seconds
            ) as answer,
        ):
            begun = True
            assert answer.status_code in (200, 503), answer.read()
            arriving = answer.iter_raw()
            for _ in range(parts):
                next(arriving)
        return begun

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return sum(pool.map(leave, range(count)))


def request(path: str, body: bytes, headers: dict[str, str], *, length: int | None = None) -> bytes:
    """A POST of JSON as bytes; `length`: what it says of the body's, where that is a lie."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: here",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def connection(url: str, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A plain TCP connection; `receive_bytes`: of its buffer, for a client that reads slowly."""
    where = urlsplit(url)
    with socket.socket() as plain:
        if receive_bytes is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.settimeout(60)
        plain.connect((where.hostname, where.port))
        yield plain


@contextlib.contextmanager
def slow_readers(
    url: str, path: str, body: dict[str, Any], count: int, headers: dict[str, str]
) -> Iterator[list[socket.socket]]:
    """Clients that ask, and then read a few bytes when `sip` is called, or none."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            one = stack.enter_context(connection(url, 4096))
            one.sendall(request(path, json.dumps(body).encode(), headers))
            sockets.append(one)
        yield sockets


def sip(sockets: list[socket.socket], seconds: float, size: int = 64) -> None:
    """All but the first, which reads nothing, read `size` bytes ten times a second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for one in sockets[1:]:
            assert one.recv(size)
        time.sleep(0.1)


def malformed(path: str, headers: dict[str, str], big_bytes: int) -> dict[str, bytes]:
    """Requests that will not do, by what is wrong with them."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    start = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n{lines}"
    chunked = (start + "Transfer-Encoding: chunked\r\n\r\n").encode()
    deep = b"[" * 100_000 + b"]" * 100_000
    return {
        "no json": request(path, b"{nonsense", headers),
        "nothing": request(path, b"", headers),
        "a number": request(path, b"5", headers),
        "nul bytes": request(path, b"\0" * 4096, headers),
        "nul in text": request(path, b'{"input": "a\\u0000b", "prompt": "a\\u0000b"', headers),
        "not utf-8": request(path, b'{"input": "\xff\xfe", "prompt": "\xff"}', headers),
        "a lone surrogate": request(path, b'{"input": 5, "prompt": {"a": "\\ud800"}}', headers),
        "deep json": request(path, deep, headers),
        "deep arguments": request(path, b'{"vllm_xargs": {"kv_source": ' + deep + b"}}", headers),
        "a huge number": request(path, b'{"seed": ' + b"9" * 5000 + b"}", headers),
        "many bytes": request(path, b'{"x": "' + b"a" * big_bytes + b'"}', headers),
        "much text": request(
            path, b'{"input": "' + b"a" * big_bytes + b'", "prompt": 7.5, "name": []}', headers
        ),
        "bad chunk size": chunked + b"zz\r\nabc\r\n0\r\n\r\n",
        "endless chunk size": chunked + b"f" * 70_000,
        "negative length": (start + "Content-Length: -5\r\n\r\n").encode(),
        "two lengths": (start + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde").encode(),
        "a huge header": (start + f"X-Huge: {'a' * 200_000}\r\n\r\n").encode(),
        "many headers": (start + "X-Many: a\r\n" * 20_000 + "\r\n").encode(),
        "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 512,
        "a bad line": b"GET\r\n\r\n",
    }


CUT = {
    "a body that does not come": lambda path, headers: request(path, b'{"a', headers, length=5000),
    "half a header": lambda path, headers: f"POST {path} HTTP/1.1\r\nHost: h".encode(),
}
"""Requests that are never whole: the client leaves."""


def answer_to(url: str, raw: bytes) -> int | None:
    """The status of the server's answer to those bytes; None: it has closed the connection."""
    with connection(url) as plain:
        try:
            plain.sendall(raw)
            first = plain.makefile("rb").readline()
        except (ConnectionError, BrokenPipeError):
            return None
    return int(first.split()[1]) if first.startswith(b"HTTP/1.1 ") else None


def send_malformed(server: VllmServer, path: str, headers: dict[str, str], scale: Scale) -> None:
    """Send them all, to one route: each is refused, and none is the server's fault."""
    for _ in range(scale.times):
        for name, raw in malformed(path, headers, scale.big_bytes).items():
            status = answer_to(server.url, raw)
            assert status is None or 400 <= status < 500, f"{path}, {name}: {status}"
        for make in CUT.values():
            with connection(server.url) as plain:
                plain.sendall(make(path, headers))
    health = httpx.get(f"{server.url}/health", timeout=60)
    assert health.status_code == 200
