"""An uploaded sample of a voice, decoded where nothing it does can reach the server.

FFmpeg reads formats by the hundred, and some of them name other files. So a sample is decoded by a
process of its own, with limits on memory and time, from bytes in memory, and only in formats that
hold sound and nothing else.
"""

from __future__ import annotations

import asyncio
import io
import resource
import sys

import numpy as np

from bounded_kv_speech.frames import SAMPLE_RATE, Floats

MAX_BYTES = 10_000_000
SHORTEST_S, LONGEST_S = 1.0, 30.0
"""What is beyond the longest is not decoded."""
TIMEOUT_S = 20.0
MEMORY_BYTES = 2 << 30
"""Of the process's addresses: its libraries take most of them."""
FORMATS = ("wav", "mp3", "flac", "ogg", "mov", "matroska", "aac", "aiff", "caf")
"""As FFmpeg calls them: MP4, M4A and WebM are among them."""
_UNREADABLE = 3
"""Exit status of the process when the sample is at fault."""


class SampleError(ValueError):
    """A sample that will not do."""


async def read_sample_safely(data: bytes, timeout_s: float = TIMEOUT_S) -> Floats:
    """A sample's sound `[N]` at 24 kHz, its channels mixed.

    Raises:
        SampleError: naming what is wrong, and the limit.
    """
    if len(data) > MAX_BYTES:
        raise SampleError(f"has {len(data)} bytes; must have at most {MAX_BYTES}")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        sound, said = await asyncio.wait_for(process.communicate(data), timeout_s)
    except TimeoutError:
        raise SampleError(f"is not decoded within {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == _UNREADABLE:
        raise SampleError(said.decode(errors="replace").strip())
    if process.returncode:
        raise SampleError(f"cannot be decoded (status {process.returncode})")
    samples = np.frombuffer(sound, np.float32)
    if len(samples) < SHORTEST_S * SAMPLE_RATE:
        raise SampleError(
            f"has {len(samples) / SAMPLE_RATE:.2f} s of sound; must have {SHORTEST_S:g} s at least"
        )
    return samples


def decode(data: bytes) -> Floats:
    """Decode a sample in this process; see `read_sample_safely`.

    Raises:
        SampleError: it is in none of `FORMATS`, or has no sound.
    """
    import av

    only = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
    try:
        found = av.open(io.BytesIO(data), "r", container_options=only)
    except (av.FFmpegError, ValueError) as error:
        raise SampleError(f"is no sound in a known format ({', '.join(FORMATS)})") from error
    if not found.streams.audio:
        raise SampleError("has no sound")
    parts, count, most = [], 0, int(LONGEST_S * SAMPLE_RATE)
    resampler = av.AudioResampler("flt", "mono", SAMPLE_RATE)
    with found:
        try:
            for frame in found.decode(audio=0):
                for part in resampler.resample(frame):
                    parts.append(part.to_ndarray().reshape(-1))
                    count += len(parts[-1])
                if count >= most:
                    break
        except av.FFmpegError as error:
            if not parts:
                raise SampleError(f"cannot be decoded: {error.strerror}") from error
            # Cut off at its end: what there is, is used.
    if not parts:
        raise SampleError("has no sound")
    return np.concatenate(parts)[:most].astype(np.float32)


def main() -> int:
    """Standard input to standard output, within limits."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S), int(TIMEOUT_S)))
    try:
        sound = decode(sys.stdin.buffer.read())
    except SampleError as error:
        print(error, file=sys.stderr)
        return _UNREADABLE
    sys.stdout.buffer.write(sound.tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main())
