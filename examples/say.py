"""Say something: `python examples/say.py "Good morning." -o out.wav --voice heart`.

The embedded voice, in this process: sentence follows sentence in one stream, whose cache stays as
large as it was. `--voice` is one of the package's, or a WAV file of a second or two of any speech.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

from vllm.v1.engine.async_llm import AsyncLLM

from bounded_kv_speech.decode import StreamingDecoder
from bounded_kv_speech.front_end import FrontEnd
from bounded_kv_speech.package import BUILT_IN, Package
from bounded_kv_speech.speak import Sampling, Speaker
from bounded_kv_speech.turns import given
from bounded_kv_speech.voice import prompt_of
from bounded_kv_speech.wav import WavFile, read_wav


def main() -> None:
    """Speak into a file, with progress on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="what to say; - reads it from standard input")
    parser.add_argument("-o", "--out", type=Path, default=Path("out.wav"), help="(%(default)s)")
    parser.add_argument("--voice", default="heart", help="a name, or a WAV file (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=Sampling.temperature)
    parser.add_argument("--package", type=Path, default=BUILT_IN, help="folder of another voice")
    args = parser.parse_args()
    try:
        package = Package.load(args.package)
        voice = find_voice(package, args.voice)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    utterances = FrontEnd().utterances(sys.stdin.read() if args.text == "-" else args.text)
    if not utterances:
        parser.error("text: has nothing that can be said")
    sampling = Sampling(args.temperature, seed=args.seed)
    asyncio.run(say(package, voice, utterances, sampling, args.out))


def find_voice(package: Package, name: str) -> list[int]:
    """Tokens of a voice of the package, or of a WAV file's."""
    if name in package.voices:
        return package.voices[name]
    if not Path(name).is_file():
        known = ", ".join(package.voices)
        raise ValueError(f"--voice {name}: is no file, and no voice; voices: {known}")
    return prompt_of(read_wav(Path(name)), package.codec.encoder)


async def say(
    package: Package,
    voice: list[int],
    utterances: list[list[int]],
    sampling: Sampling,
    path: Path,
) -> None:
    """Speak the utterances in one stream, and write what comes while it comes."""
    llm = AsyncLLM.from_engine_args(package.engine_args(max_streams=1))

    try:
        async with Speaker(llm, StreamingDecoder(package.codec.decoder, 1)) as speaker:
            with WavFile(path) as file:
                start, first = time.perf_counter(), 0.0
                async for said in speaker.speak("say", voice, given(utterances), sampling):
                    file.write(said.samples)
                    took = time.perf_counter() - start
                    first = first or (took if file.seconds else 0.0)
                    show(file.seconds, took, first)
    finally:
        llm.shutdown()
    print(f"\nwrote {path}", file=sys.stderr)


def show(audio_s: float, took_s: float, first_s: float) -> None:
    """One line of progress, over the last."""
    factor = took_s / audio_s if audio_s else 0.0
    print(
        f"\r{audio_s:6.1f} s of speech in {took_s:6.1f} s; first audio after {first_s:.2f} s; "
        f"real-time factor {factor:.2f}",
        end="",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
