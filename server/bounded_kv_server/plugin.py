"""What `--kv-plugin bounded` finds of this package: flags, what a speaking model needs, routes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

from bounded_kv_server import profile, settings
from bounded_kv_server.settings import KEY, SpeechSettings


class SpeechExtension:
    """See `vllm_bounded_kv.engine.extensions`."""

    title = "Speech"
    _missing: str | None = None
    """A package that the routes need, and that is not installed."""

    def add_flags(self, flag: Callable[..., None]) -> None:
        """`--speech-profile` and others."""
        settings.add_flags(flag)

    def configure(self, config: Any) -> None:
        """Give the engine the logits processors of its model's profile."""
        name = _profile_name(config)
        if name is None:
            return
        model_config = config.model_config
        loaded = list(model_config.logits_processors or ())
        wanted = profile.find(name).logits_processors
        model_config.logits_processors = loaded + [p for p in wanted if p not in loaded]

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; they say so where the served model does not speak."""
        try:
            from bounded_kv_server import routes
        except ModuleNotFoundError as error:
            self._missing = error.name
            return
        routes.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Load what makes the model's tokens sound, and say a word with it."""
        config = engine_client.vllm_config
        chosen = SpeechSettings.of(config.additional_config)
        name = _profile_name(config)
        if self._missing is not None:
            if name is None:
                return  # a server of text needs nothing of this
            raise RuntimeError(
                f"speech needs the package {self._missing}: pip install 'vllm-bounded-kv[server]'"
            )
        from bounded_kv_server.pins import EnginePins
        from bounded_kv_server.server import SpeechServer

        model = None if name is None else profile.find(name).load(engine_client, chosen)
        served = args.served_model_name or [args.model]
        state.bounded_kv_speech = SpeechServer(model, served, chosen, EnginePins(engine_client))
        state.bounded_kv_speech.ending = state.bounded_kv_ending
        await state.bounded_kv_speech.start()


def _profile_name(config: Any) -> str | None:
    """The profile that the operator names, or that the model's `config.json` does."""
    if (name := SpeechSettings.of(config.additional_config).profile) is not None:
        return name
    own = getattr(config.model_config.hf_config, KEY, None)
    return own.get("profile") if isinstance(own, Mapping) else None


EXTENSION = SpeechExtension()
