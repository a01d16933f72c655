"""The page in a browser: in front of the embedded voice, and of tones where things go wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from bounded_kv_server.encoding import encode_all
from support import speech_server
from support.browser import TIMEOUT_MS, Watched, chromium, watched
from support.server import wait_until
from support.tones import RATE, Tones
from support.voice_server import KEY, metrics_of, shown, wait_until_silent
from vllm_bounded_kv.launch import VllmServer

TEXT = "Good morning. It is nice to see you."
LONG = " ".join(["There are many of us here today, and all of them speak at once."] * 12)
FOREVER = "One two forever" + " and ever" * 40
"""Tones end where a text can take no more: this one after some 20 s."""
SHOTS = os.environ.get("PAGE_SCREENSHOTS")
"""A folder: pictures for the documentation are written there."""

expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def tones(tmp_path: Path) -> Iterator[tuple[str, Any]]:
    with speech_server.serving(Tones(chunk_s=0.01), tmp_path) as found:
        yield found


@pytest.fixture
def at_tones(browser: Browser, tones: tuple[str, Any]) -> Iterator[Watched]:
    with watched(browser, tones[0]) as seen:
        expect(seen.page.get_by_role("combobox", name="Voice")).to_have_value("low")
        yield seen


@pytest.fixture
def at_voice(browser: Browser, server: VllmServer) -> Iterator[Watched]:
    with watched(browser, server.url) as seen:
        unlock(seen.page)
        yield seen


def unlock(page: Page) -> None:
    """The page asks for the key, and has put the focus where it goes."""
    expect(page.locator("#notice")).to_contain_text("It wants a key")
    expect(page.get_by_label("Key", exact=True)).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("combobox", name="Voice")).to_have_value("heart")
    expect(page.locator("#notice")).to_be_hidden()


def speak(page: Page, text: str) -> Locator:
    """The card of a new stream."""
    before = page.get_by_role("article").count()
    page.get_by_label("Text").fill(text)
    page.get_by_role("button", name="Speak").click()
    expect(page.get_by_role("article")).to_have_count(before + 1)
    return page.get_by_role("article", name=f"{before + 1} · ")


def figure(card: Locator, name: str) -> str:
    return card.locator(f"[data-figure={name}]").inner_text()


def number(card: Locator, name: str) -> float:
    return float(figure(card, name).split()[0].replace(",", ""))


def test_without_a_key_the_page_is_there_and_nothing_else(server: VllmServer) -> None:
    for path, status in [("/", 200), ("/page/app.js", 200), ("/v1/audio/voices", 401)]:
        assert httpx.get(server.url + path).status_code == status


def test_it_speaks(at_voice: Watched, server: VllmServer) -> None:
    card = speak(at_voice.page, TEXT)
    expect(card).to_have_attribute("data-state", "done")
    parts = at_voice.heard()
    played = sum(part["count"] / part["rate"] for part in parts)
    assert played > 1
    assert sum(part["energy"] for part in parts) > 1
    assert figure(card, "made") == f"{played:.1f} s"
    if figure(card, "underruns") == "0":
        for part, after in itertools.pairwise(parts):
            gap = after["when"] - part["when"] - part["count"] / part["rate"]
            assert abs(gap) < 0.5 / part["rate"]
    assert number(card, "first") > 0
    assert number(card, "factor") > 0
    now = shown(server)
    assert number(card, "held") == now["slot_blocks"]
    assert number(card, "stock") == -(-number(card, "position") // now["block_size"])
    expect(card.get_by_role("img")).to_have_attribute(
        "aria-label",
        f"At position {figure(card, 'position')} the stream holds "
        f"{figure(card, 'held')} blocks; stock vLLM would hold {figure(card, 'stock')}.",
    )
    expect(at_voice.page.get_by_role("status")).to_have_text("Stream 1 has been heard.")


def test_two_at_once_and_each_can_be_stopped(at_voice: Watched, server: VllmServer) -> None:
    page = at_voice.page
    first, second = speak(page, LONG), speak(page, LONG)
    readings = []
    for card in (first, second):
        expect(card.locator("[data-figure=position]")).to_have_text(re.compile(r"\d"))
        readings.append(number(card, "position"))
    assert shown(server)["slots_used"] == 2
    expect(page.locator("#server")).to_contain_text("2 streams of this server")
    for card, before in zip((first, second), readings, strict=True):
        wait_until(lambda: number(card, "position"), lambda now: now > before)  # noqa: B023
        assert number(card, "held") == shown(server)["slot_blocks"]
    first.get_by_role("button", name="Stop").click()
    expect(first).to_have_attribute("data-state", "stopped")
    wait_until(lambda: shown(server)["slots_used"], lambda used: used == 1)
    expect(second).to_have_attribute("data-state", "speaking")
    page.keyboard.press("Escape")
    expect(second).to_have_attribute("data-state", "stopped")
    wait_until_silent(server)
    wait_until(lambda: metrics_of(server)("bounded_kv_speech_active_streams"), lambda n: n == 0)


def test_keys_do_it_all(at_tones: Watched) -> None:
    page = at_tones.page
    page.keyboard.press("Tab")
    expect(page.get_by_label("Text")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Control+A")
    page.keyboard.type(FOREVER)
    page.keyboard.press("Tab")
    page.keyboard.type("high")
    expect(page.get_by_role("combobox", name="Voice")).to_have_value("high")
    page.keyboard.press("Control+Enter")
    page.keyboard.press("Control+Enter")
    cards = page.get_by_role("article")
    expect(cards).to_have_count(2)
    for i in range(2):
        expect(cards.nth(i)).to_have_attribute("data-state", "speaking")
    cards.nth(0).focus()
    page.keyboard.press("Escape")
    expect(cards.nth(0)).to_have_attribute("data-state", "stopped")
    expect(cards.nth(1)).to_have_attribute("data-state", "speaking")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # what can still be done with it: Remove
    expect(cards).to_have_count(1)
    expect(cards.nth(0)).to_be_focused()
    page.keyboard.press("Escape")
    expect(cards.nth(0)).to_have_attribute("data-state", "stopped")


def test_what_is_wrong_is_said_in_words(at_tones: Watched, tones: tuple[str, Any]) -> None:
    page = at_tones.page
    for text, words in [
        ("?!", "Input has nothing that can be said. Change the text."),
        ("silent", "utterances"),
        ("a" * 5000, "must have at most 4096"),
        ("one two fail", "The sound broke off after 0.2 s. "),
    ]:
        expect(speak(page, text).get_by_role("alert")).to_contain_text(words)
    for _ in range(5):
        speak(page, FOREVER)
    page.get_by_role("button", name="Speak").click()
    expect(page.get_by_role("status")).to_contain_text("stop one first")
    page.get_by_role("button", name="Stop all").click()
    wait_until(lambda: tones[1].server.gate.num_active, lambda n: n == 0)


def test_a_server_that_is_gone(browser: Browser, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with speech_server.serving(Tones(), tmp_path) as (url, _):
            page = stack.enter_context(watched(browser, url)).page
            expect(page.get_by_role("combobox", name="Voice")).to_have_value("low")
        alert = speak(page, TEXT).get_by_role("alert")
        expect(alert).to_contain_text("The server does not answer. See that it runs")


def test_a_recording_becomes_a_voice_or_why_not(at_tones: Watched, tmp_path: Path) -> None:
    page = at_tones.page
    page.get_by_text("Add a voice").click()
    page.get_by_label("Name").fill("mine")
    add, notice = page.get_by_role("button", name="Add it"), page.locator("#notice")

    sample = tmp_path / "sample.wav"

    def choose(data: bytes, size: int | None = None) -> None:
        sample.write_bytes(data)
        os.truncate(sample, size or len(data))
        page.get_by_label("A recording").set_input_files(sample)

    choose(b"no sound")
    add.click()
    assert page.get_by_label("Whose voice").evaluate("box => !box.validity.valid")
    page.get_by_label("Whose voice").check()
    add.click()
    expect(notice).to_contain_text("Choose another recording")
    choose(b"", 11 << 20)
    add.click()
    expect(notice).to_contain_text("11534336 bytes")
    tone = 0.2 * np.sin(np.arange(2 * RATE) / 20, dtype=np.float32)
    choose(encode_all(tone, "wav", RATE))
    add.click()
    expect(page.get_by_role("combobox", name="Voice")).to_have_value("mine")
    expect(notice).to_be_hidden()
    expect(speak(page, "one")).to_have_attribute("data-state", "done")
    page.get_by_role("button", name="Forget").click()
    expect(page.get_by_role("combobox", name="Voice")).to_have_value("low")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_is_narrow_and_still(browser: Browser, tones: tuple[str, Any], scheme: Any) -> None:
    narrow: Any = {"width": 360, "height": 700}
    with watched(
        browser, tones[0], viewport=narrow, color_scheme=scheme, reduced_motion="reduce"
    ) as seen:
        card = speak(seen.page, FOREVER)
        expect(card).to_have_attribute("data-state", "speaking")
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 360
        colours = seen.page.evaluate(
            "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
        )
        ink, back = (sum(map(int, each[4:-1].split(","))) for each in colours)
        assert (ink > back) == (scheme == "dark")
        moves = "getComputedStyle(document.querySelector('.card .state'), '::before').animationName"
        assert seen.page.evaluate(moves) == "none"


@pytest.mark.skipif(SHOTS is None, reason="PAGE_SCREENSHOTS names no folder")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_pictures(browser: Browser, server: VllmServer, scheme: Any) -> None:
    assert SHOTS is not None
    with watched(
        browser, server.url, viewport={"width": 900, "height": 600}, color_scheme=scheme
    ) as seen:
        unlock(seen.page)
        seen.page.get_by_text("API key", exact=True).click()
        first = speak(seen.page, LONG)
        stock = "[data-figure=stock]"
        expect(first.locator(stock)).to_have_text(re.compile(r"^(2[4-9]|[3-9]\d)$"))
        seen.page.get_by_role("combobox", name="Voice").select_option("robin")
        second = speak(seen.page, LONG)
        expect(second.locator(stock)).to_have_text(re.compile(r"^[1-9]\d$"))
        assert first.get_attribute("data-state") != "failed"
        seen.page.screenshot(path=Path(SHOTS) / f"page-{scheme}.png", full_page=True)
        seen.page.keyboard.press("Escape")
