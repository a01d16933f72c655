"""The least of a supervisor: it starts a server again until that ends well (`on-failure`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_bounded_kv.launch import VllmServer

LOOP = """
codes=$1; shift
trap 'kill -TERM "$child"' TERM
code=1
while [ "$code" -ne 0 ]; do
    "$@" & child=$!
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
    echo "$code" >>"$codes"
done
"""


class Supervised(VllmServer):
    """A server under a supervisor: `process` is the supervisor."""

    def __init__(self, model: Path, flags: Sequence[str], codes: Path) -> None:
        super().__init__(model, flags)
        self._codes = codes
        codes.touch()
        self.command = ["bash", "-c", LOOP, "supervisor", str(codes), *self.command]

    @property
    def codes(self) -> list[int]:
        """Exit codes of the servers so far."""
        return [int(code) for code in self._codes.read_text().split()]
