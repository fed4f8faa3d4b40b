"""The live page in a real browser: it streams coloured text, compares, draws, and fits a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="faircopy[serve] is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")

from playwright import sync_api as playwright

from faircopy import LLM, bundled
from tests.server_helpers import Running, serving

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    llm = LLM(
        bundled.target(), bundled.draft(), 4, drafter_per_request=True, max_batch=8, cache_memory="16MiB", threads=1
    )
    with serving(llm, shadow_audit=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


def open_page(browser: Any, server: Running, **options: Any) -> tuple[Any, list[str]]:
    """A page, and the list of its errors and of requests that left this server."""
    page = browser.new_page(**options)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else problems.append(r.url))
    page.goto(server.url)
    page.wait_for_function("document.getElementById('state').textContent === 'serving'")
    return page, problems


def test_the_page_compares_plain_and_speculative_by_keyboard_alone(browser: Any, server: Running) -> None:
    page, problems = open_page(browser, server, viewport={"width": 1180, "height": 1080})
    page.focus("#prompt")
    page.keyboard.press("End")
    for _ in range(6):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "compare"
    page.keyboard.press("Space")
    page.keyboard.press("Control+Enter")
    page.wait_for_function("document.getElementById('verdict').textContent !== ''", timeout=60_000)
    assert page.text_content("#verdict") == "The texts are identical."
    plain, fast = page.query_selector_all(".output")
    assert not plain.query_selector_all(".drafted") and fast.query_selector_all(".drafted")
    assert fast.query_selector_all(".target")
    page.wait_for_function("document.querySelectorAll('#c-position rect').length >= 4")
    page.wait_for_function("document.querySelector('#c-length polyline').points.length >= 2")  # one point is not seen
    page.wait_for_function("/^[1-9].* 0 different/.test(document.getElementById('audit').textContent)", timeout=30_000)
    assert "pages of 32 tokens" in page.text_content("#pages") and page.query_selector_all("#map i")
    if os.environ.get("FAIRCOPY_SCREENSHOT"):
        page.screenshot(path=os.environ["FAIRCOPY_SCREENSHOT"], full_page=True)
    assert problems == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(browser: Any, server: Running, scheme: str) -> None:
    page, problems = open_page(browser, server, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.fill("#tokens", "12")
    page.click("#send")
    page.wait_for_function("document.querySelectorAll('.text span').length > 3")
    page.wait_for_function("!document.getElementById('send').disabled")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    if os.environ.get("FAIRCOPY_SCREENSHOT"):
        page.screenshot(path=os.environ["FAIRCOPY_SCREENSHOT"].replace(".png", f"-{scheme}.png"), full_page=True)
    assert problems == []
    page.close()


def test_a_refusal_is_shown(browser: Any, server: Running) -> None:
    page, _ = open_page(browser, server)
    page.fill("#prompt", "word " * 900)
    page.click("#send")
    page.wait_for_function("document.getElementById('verdict').textContent.includes('context')")
    page.close()
