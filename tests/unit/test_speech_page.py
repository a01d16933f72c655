"""The page's files: where they are, what they are sent as, and what they may do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from bounded_kv_server.page import FOLDER
from bounded_kv_server.sample_decoder import MAX_BYTES
from support.speech_server import serving
from support.tones import Tones

FILES = sorted(path.name for path in FOLDER.iterdir())
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(Tones(), tmp_path_factory.mktemp("voices")) as (url, _):
        yield url


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_each_file_is_what_it_is(url: str, path: str) -> None:
    answer = httpx.get(url + path)
    name = Path(path).name or "index.html"
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"].startswith(KINDS[Path(name).suffix])
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy and "*" not in policy and ":" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = httpx.get(url + path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.head(url + path).headers["content-length"] == str(len(answer.content))


def test_all_files_and_no_others_are_asked_for() -> None:
    """Scripts ask for others; nothing is inline, and nothing comes from elsewhere."""
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|<style", index)
    asked = set(re.findall(r'(?:src|href)="([^"]+)"', index))
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        asked |= {urljoin(f"page/{name}", each) for each in re.findall(r'from "([^"]+)"', text)}
    assert asked == {f"page/{name}" for name in FILES} - {"page/index.html"}


@pytest.mark.parametrize("path", ["/page/none.js", "/page/../page.py", "/page/%2e%2e/page.py"])
def test_there_are_no_others(url: str, path: str) -> None:
    assert httpx.get(url + path).status_code == 404


def test_a_model_that_does_not_speak_has_no_page(tmp_path: Path) -> None:
    with serving(None, tmp_path) as (url, _):
        for path in ("/", "/page/app.js"):
            answer = httpx.get(url + path)
            assert answer.status_code == 404
            assert "no speech profile" in answer.json()["error"]["message"]


def test_a_recording_may_be_as_large_as_the_server_takes() -> None:
    found = re.search(r"MAX_BYTES = ([\d *]+);", (FOLDER / "voices.js").read_text())
    assert found is not None
    product = 1
    for factor in found[1].split("*"):
        product *= int(factor)
    assert product == MAX_BYTES
