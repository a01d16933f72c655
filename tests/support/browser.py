"""Debian's Chromium, and a page in it that notes what it does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required"]
TIMEOUT_MS = 60_000
"""Of whatever is waited for: the machine may be busy."""
LISTEN = """
window.heard = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (when) {
  const samples = this.buffer.getChannelData(0);
  window.heard.push({
    when, rate: this.buffer.sampleRate, count: samples.length,
    energy: samples.reduce((sum, each) => sum + each * each, 0),
  });
  return start.call(this, when);
};
"""
"""Notes what is played, and when."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips what needs it where there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """What a page has done that it may not do."""

    page: Page
    origins: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def heard(self) -> list[dict[str, Any]]:
        """The parts that were given to be played, in the order in which they were."""
        found: list[dict[str, Any]] = self.page.evaluate("window.heard")
        return found


@contextmanager
def watched(browser: Browser, url: str, **options: Any) -> Iterator[Watched]:
    """A page at `url`; that it asks nobody else, and that its scripts do not fail, is seen to."""
    context = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    context.add_init_script(LISTEN)
    page = context.new_page()
    seen = Watched(page)

    def note(message: Any) -> None:
        # A refusal is an answer that the page puts into words; Chromium notes it all the same.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            seen.errors.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.origins.add(urlsplit(request.url).netloc))
    page.goto(url)
    yield seen
    assert seen.errors == []
    assert seen.origins == {urlsplit(url).netloc}
    context.close()
