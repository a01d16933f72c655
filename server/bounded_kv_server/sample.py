"""Reads samples of voices in processes of their own: a file that breaks the decoder breaks that."""

from __future__ import annotations

import asyncio
import os
import sys

import numpy as np

from bounded_kv_server import sample_decoder
from bounded_kv_server.sample_decoder import DECODE_S, REFUSED, SampleError, check_size
from bounded_kv_speech.frames import Floats

_PASSED_ON = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Where it finds what it imports. It sees nothing else of our environment: keys may be in it."""
# Threads that it does not need would take address space, which is limited.
_FEW_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


async def read_sample_safely(data: bytes, timeout_s: float = DECODE_S) -> Floats:
    """As `sample_decoder.read_sample`, in a process that is gone when this returns or raises.

    Raises:
        SampleError: what is wrong with the file, the time it took to decode, or that the decoder
            died of it.
    """
    check_size(data)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # else it finds our modules where it looks for those of others
        sample_decoder.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _FEW_THREADS,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(data)
    except TimeoutError as error:
        raise SampleError(
            f"the sample of the voice was not decoded after {timeout_s:g} s, the most that it "
            "may take"
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == REFUSED:
        raise SampleError(output.decode())
    if process.returncode != 0:
        raise SampleError(
            f"the sample of the voice cannot be read: its decoder ended with {process.returncode}"
        )
    return np.frombuffer(output, np.float32)
