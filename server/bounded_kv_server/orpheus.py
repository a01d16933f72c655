"""Orpheus (Canopy Labs): a Llama that speaks in the codes of SNAC, seven a frame of 85 ms.

Its prompt is a start token, "VOICE: TEXT", and four tokens that end it and begin speech; each of a
frame's seven codes has 4,096 tokens of its own. It is served as the Llama it is.
"""

from __future__ import annotations

from typing import Any

from bounded_kv_server.codec_model import Codec, CodecModel, Codes, Manner, Prompt
from bounded_kv_server.profile import SpeechModel
from bounded_kv_server.settings import SpeechSettings
from bounded_kv_server.snac_codec import CODEBOOK, FRAME_CODES, SnacCodec

CODEC = "hubertsiuzdak/snac_24khz"
"""Where `--speech-codec` says nothing else."""
VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
START, BEGIN_OF_TEXT = 128259, 128000
END_OF_PROMPT = (128009, 128260, 128261, 128257)
CODES = Codes(first=128266, codebook=CODEBOOK, of_frame=FRAME_CODES, end=128258)
PROMPT = Prompt((START, BEGIN_OF_TEXT), END_OF_PROMPT, {name: f"{name}:" for name in VOICES})
MANNER = Manner(temperature=0.6, top_p=0.8, repetition_penalty=1.3)


def orpheus(engine_client: Any, tokenizer: Any, codec: SnacCodec) -> CodecModel:
    """Orpheus as `engine_client` serves it."""
    return CodecModel(engine_client, tokenizer, CODES, PROMPT, MANNER, sound_of(codec))


def sound_of(codec: SnacCodec) -> Codec:
    """SNAC as what makes samples of frames."""
    return Codec(codec.rate, codec.frame_samples, codec.stream)


class OrpheusProfile:
    """See `Profile`."""

    logits_processors = ()

    def load(self, engine_client: Any, settings: SpeechSettings) -> SpeechModel:
        """The served Llama, with SNAC beside it."""
        codec = SnacCodec.load(settings.codec or CODEC)
        return orpheus(engine_client, engine_client.get_tokenizer(), codec)


PROFILE = OrpheusProfile()
