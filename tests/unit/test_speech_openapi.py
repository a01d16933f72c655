"""Whatever the OpenAPI document lets a client send: never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from support.speech_server import serving
from support.tones import Tones

OPERATIONS = [
    ("/v1/audio/speech", "post"),
    ("/v1/audio/voices", "get"),
    ("/v1/audio/voices", "post"),
    ("/v1/audio/voices/{name}", "delete"),
]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving(Tones(), tmp_path_factory.mktemp("voices"), max_voices=4) as (url, _):
        yield schemathesis.openapi.from_url(url + "/openapi.json")


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_nothing_is_a_server_error(document: Any, path: str, method: str) -> None:
    @settings(
        max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(case=document[path][method].as_strategy())
    def call(case: Any) -> None:
        case.validate_response(case.call(), checks=[not_a_server_error])

    call()


def test_the_sockets_messages_have_schemas(document: Any) -> None:
    raw = document.raw_schema
    client = raw["x-websockets"]["/v1/audio/speech/stream"]["client"]
    kinds = client["discriminator"]["mapping"]
    assert set(kinds) == {
        "session.config",
        "input.text",
        "input.done",
        "input.clear",
        "session.close",
    }
    for kind, reference in kinds.items():
        schema = raw["components"]["schemas"][reference.removeprefix("#/components/schemas/")]
        assert schema["properties"]["type"]["const"] == kind
