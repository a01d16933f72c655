"""`python -m bounded_kv_speech.recipe.gate`: is speech understood after the codec as before it?

Sentences never learned from, in the voices built in, heard by the judge as the teacher says them,
as the frames read off the teacher's sound say them (the best that a codec of such frames could do),
and as the codec resynthesises them: from a stream's tokens, phones between the codes, and from the
codes alone, as when nobody knows what a sample says.
The language model is not worth training before the two are close.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bounded_kv_speech.codec import Codec
from bounded_kv_speech.decode import decode_at_once
from bounded_kv_speech.frames import Floats
from bounded_kv_speech.recipe import text
from bounded_kv_speech.recipe.arguments import count
from bounded_kv_speech.recipe.corpus import marks_of
from bounded_kv_speech.recipe.envelopes import envelopes
from bounded_kv_speech.recipe.judge import Judge, word_error_rate
from bounded_kv_speech.recipe.teacher import BUILT_IN, Teacher, Utterance
from bounded_kv_speech.recipe.train_codec import load_codec
from bounded_kv_speech.synth import synthesise_at_once
from bounded_kv_speech.tokens import FIRST_CODE
from bounded_kv_speech.voice import codes_of

MARGIN = 0.05
KINDS = ("teacher", "frames", "codec", "codes alone")


def main(argv: list[str] | None = None) -> int:
    """Print the word error rates; exit status 1 when the codec misses the gate."""
    parser = argparse.ArgumentParser(prog="python -m bounded_kv_speech.recipe.gate")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--sentences", type=count, default=100, help="in turn in each voice")
    args = parser.parse_args(argv)
    _, unseen = text.load(args.work)
    codec = load_codec(args.work)
    teacher, judge = Teacher(), Judge()
    heard: dict[str, list[tuple[str, dict[str, str]]]] = {name: [] for name in BUILT_IN}
    chosen = unseen[: args.sentences]
    for i, sentence in enumerate(tqdm(chosen, unit=" sentences", file=sys.stderr)):
        name = list(BUILT_IN)[i % len(BUILT_IN)]
        said = [teacher.say(p, BUILT_IN[name], i) for p in teacher.phonemes(sentence)]
        samples = np.concatenate([each.samples for each in said])
        frames = [envelopes(each) for each in said]
        sounds = {
            "teacher": samples,
            "frames": synthesise_at_once(np.concatenate(frames)),
            "codec": np.concatenate([resynthesised(codec, each, marked=True) for each in said]),
            "codes alone": np.concatenate(
                [resynthesised(codec, each, marked=False) for each in said]
            ),
        }
        heard[name].append((sentence, {kind: judge.hear(sounds[kind]) for kind in sounds}))
    everything = [row for rows in heard.values() for row in rows]
    figures = {
        name: {
            kind: round(word_error_rate((said, texts[kind]) for said, texts in rows), 3)
            for kind in KINDS
        }
        for name, rows in [*heard.items(), ("all", everything)]
        if rows
    }
    print(json.dumps({"sentences": len(everything), "wer": figures}))
    return int(figures["all"]["codec"] > figures["all"]["teacher"] + MARGIN)


def resynthesised(codec: Codec, utterance: Utterance, marked: bool) -> Floats:
    """Through the codec and back, with or without what it says between its codes."""
    codes = codes_of(utterance.samples, codec.encoder) + FIRST_CODE
    marked_by = marks_of(utterance, len(codes))
    tokens = np.stack([marked_by, codes], 1).reshape(-1) if marked else codes
    return decode_at_once(codec.decoder, tokens.tolist())


if __name__ == "__main__":
    sys.exit(main())
