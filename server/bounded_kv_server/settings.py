"""What the operator sets of the speech server, from `--kv-plugin bounded`'s flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

KEY = "bounded_kv_speech"
"""In vLLM's `additional_config`, and in a model's `config.json`."""


@dataclass(frozen=True)
class SpeechSettings:
    """See the flags below."""

    profile: str | None = None
    codec: str | None = None
    speech_config: str | None = None
    max_audio_streams: int = 16
    max_audio_queue: int = 64
    max_speech_input: int = 4096
    voices_dir: str | None = None
    max_voices: int = 64
    speech_idle_s: float = 60.0
    max_session_s: float = 86400.0

    def __post_init__(self) -> None:
        least = {"max_audio_queue": 0, "max_voices": 0}
        for name in ("max_audio_streams", "max_audio_queue", "max_speech_input", "max_voices"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least.get(name, 1):
                raise ValueError(
                    f"{_flag(name)} {value!r}: must be an integer of at least {least.get(name, 1)}"
                )
        for name in ("speech_idle_s", "max_session_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{_flag(name)} {value!r}: must be above 0")

    @classmethod
    def of(cls, additional_config: Any) -> SpeechSettings:
        """Those in vLLM's `additional_config`.

        Raises:
            ValueError: naming a setting that is unknown or not as it must be.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ValueError(f"{KEY}={given!r}: must be a mapping of settings")
        known = {each.name for each in fields(cls)}
        if unknown := set(given) - known:
            raise ValueError(f"{KEY}: unknown {sorted(unknown)}; known: {sorted(known)}")
        return cls(**given)

    @property
    def voices_folder(self) -> Path:
        """Where uploaded voices are kept."""
        default = "~/.local/share/vllm_bounded_kv/voices"
        return Path(self.voices_dir or default).expanduser()


def _flag(name: str) -> str:
    flags = {"profile": "--speech-profile", "codec": "--speech-codec"}
    return flags.get(name, f"--{name.replace('_', '-')}")


def add_flags(flag: Callable[..., None]) -> None:
    """Add them, with what adds one that writes into `additional_config`."""
    default = SpeechSettings()
    texts: dict[str, tuple[type, str]] = {
        "profile": (str, "How tokens become sound (default: as the model's config.json says)."),
        "codec": (
            str,
            "Folder or hub name of the codec's weights (default: the profile's).",
        ),
        "speech_config": (str, "YAML file that describes the model, for the profile `codec`."),
        "max_audio_streams": (int, "Streams that sound at once; others wait"),
        "max_audio_queue": (int, "Requests that wait for their turn; others get status 503"),
        "max_speech_input": (int, "Characters of a request's input at most"),
        "voices_dir": (str, f"Folder of uploaded voices (default: {default.voices_folder})."),
        "max_voices": (int, "Uploaded voices at most"),
        "speech_idle_s": (
            float,
            "Seconds without text or sound after which a socket is closed, "
            "as is one that does not read",
        ),
        "max_session_s": (float, "Seconds after which a socket is closed, whatever it says"),
    }
    for name, (kind, text) in texts.items():
        shown = text if text.endswith(".") else f"{text} (default: {getattr(default, name)})."
        flag(_flag(name), (KEY, name), type=kind, metavar=name.upper(), help=shown)
