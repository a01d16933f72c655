"""A sample of a voice from whatever file somebody sent, with as little trust as can be.

Run as a program it decodes its standard input in a process with limits: see `sample.py`, which
starts it. It imports nothing of ours, so that it starts fast and needs no path to us.
"""

from __future__ import annotations

import io
import resource
import sys
import wave
from collections.abc import Iterator

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.container import InputContainer
from av.error import FFmpegError, InvalidDataError
from numpy.typing import NDArray

SAMPLE_RATE = 24_000
MAX_BYTES = 10 << 20
SHORTEST_S = 1.0
LONGEST_S = 30.0
"""Used of a sample. What comes after is not decoded."""
DECODE_S = 10.0
"""Time that decoding may take."""
MEMORY_BYTES = 1 << 30
"""Address space of the process. A quarter of it is taken before a sample is read."""
CONTAINERS = ("wav", "mp3", "flac", "ogg", "mp4", "webm", "aac", "aiff", "caf")
"""By FFmpeg's names; m4a is an mp4. Others, such as playlists, can name files and addresses."""
REFUSED = 3
"""The exit status when standard output says what is wrong with the sample."""


class SampleError(ValueError):
    """A sample of a voice that cannot be used, and why."""


def read_sample(data: bytes) -> NDArray[np.float32]:
    """The first `LONGEST_S` of a file's sound `[N]` at 24 kHz, its channels mixed, within -1 and 1.

    Packets that are broken are left out, as at the end of a file that was cut off.

    Raises:
        SampleError: what is wrong with the file.
    """
    check_size(data)
    try:
        options = {"format_whitelist": ",".join(CONTAINERS)}
        with av.open(
            io.BytesIO(data),
            "r",
            container_options=options,
            metadata_errors="replace",  # titles are in all kinds of alphabets
        ) as file:
            samples = _sound_of(file)
    except SampleError:
        raise
    except (FFmpegError, ValueError) as error:
        why = error.strerror if isinstance(error, FFmpegError) else error
        raise SampleError(
            f"the sample of the voice cannot be read ({why}); "
            f"it must be a file of sound: {', '.join(CONTAINERS)}"
        ) from error
    seconds = len(samples) / SAMPLE_RATE
    if seconds < SHORTEST_S:
        raise SampleError(
            f"the sample of the voice is {seconds:.2f} s long; it must have {SHORTEST_S:g} s "
            "at least"
        )
    if not np.isfinite(samples).all():
        raise SampleError("the sample of the voice has values that are no numbers")
    return np.clip(samples, -1.0, 1.0)


def check_size(data: bytes) -> None:
    """Raises SampleError: more than `MAX_BYTES`."""
    if len(data) > MAX_BYTES:
        raise SampleError(
            f"the sample of the voice has {len(data)} bytes; it may have {MAX_BYTES} at most"
        )


def limit_this_process() -> None:
    """No file or connection can be opened from here on, and time and memory are limited."""
    read_sample(_silence())  # so that what PyAV imports late is imported now
    for what, value in (
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, int(DECODE_S)),  # ends it even when nobody is left to do so
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _silence() -> bytes:
    """The shortest sample there may be, as a WAV file."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes(bytes(2 * int(SHORTEST_S * SAMPLE_RATE)))
    return data.getvalue()


def _sound_of(file: InputContainer) -> NDArray[np.float32]:
    if not file.streams.audio:
        raise SampleError("the sample of the voice has no sound in it")
    num_wanted = int(LONGEST_S * SAMPLE_RATE)
    # Else two channels that are the same add up to more than one of them.
    resampler = AudioResampler("flt", "mono", SAMPLE_RATE, options={"rematrix_maxval": "1"})
    parts: list[NDArray[np.float32]] = []
    for frame in _frames_of(file):
        for ready in resampler.resample(frame):
            parts.append(np.asarray(ready.to_ndarray()[0], np.float32))
        if sum(map(len, parts)) >= num_wanted:
            break
    return np.concatenate(parts)[:num_wanted] if parts else np.zeros(0, np.float32)


def _frames_of(file: InputContainer) -> Iterator[AudioFrame | None]:
    """The sound's frames, and `None` at its end."""
    for packet in file.demux(file.streams.audio[0]):
        try:
            yield from packet.decode()
        except InvalidDataError:
            continue
    yield None


def main() -> None:
    """Standard input to samples, or to what is wrong with it, on standard output."""
    limit_this_process()
    try:
        sys.stdout.buffer.write(read_sample(sys.stdin.buffer.read()).tobytes())
    except SampleError as error:
        sys.stdout.buffer.write(str(error).encode())
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
