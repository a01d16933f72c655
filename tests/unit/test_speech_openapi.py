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
