"""Opens pages in a headless Chromium, and helps tests to read them.

Tests that use it are skipped only where Playwright or Chromium is not installed; continuous integration installs both.
Tested with Playwright 1.65 and Debian's Chromium 156.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    expect = sync_playwright = None

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = [
    *(["the Python package playwright"] if sync_playwright is None else []),
    *(["a chromium, chromium-browser or google-chrome in PATH"] if CHROMIUM is None else []),
]
needs_chromium = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
# Load only the page and its files: no updates, no first-run pages. No sandbox, because root has none in containers.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS), headless=True)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Open a page; at the end of the test it must have no errors and must have loaded nothing but its files."""
    contexts, faults = [], []

    def opened(path: Path, width: int = 1280, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": width, "height": 900}, **options})
        contexts.append(context)
        page, address = context.new_page(), path.as_uri()
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        beside = tuple(f"{address.removesuffix('.html')}.{end}" for end in ("html", "details.js", "sources/"))
        page.on("request", lambda asked: asked.url.startswith(beside) or faults.append(f"asked: {asked.url}"))
        page.on("requestfailed", lambda asked: faults.append(f"failed: {asked.url}"))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


def table_of(page: Page, caption: str) -> Page:
    return page.locator("table", has=page.locator("caption", has_text=caption)).first


def column(table: Page, place: int) -> list[str]:
    """First lines of a column's cells in the visible rows, from top to bottom."""
    return table.evaluate(
        """(table, place) => [...table.querySelectorAll(":scope > tbody > tr:not(.below)")]
            .filter(row => row.checkVisibility()).map(row => row.cells[place].firstChild.textContent.trim())""",
        place,
    )


def heads(table: Page) -> list[str]:
    return table.evaluate("table => [...table.tHead.rows[0].cells].map(head => head.firstChild.textContent.trim())")


def open_all(page: Page) -> None:
    """Open everything that is folded, nested parts too."""
    while page.evaluate(
        """() => {
            const closed = [...document.querySelectorAll("details:not([open])")];
            closed.forEach(details => details.open = true);
            return closed.length;
        }"""
    ):
        unfolded(page)


def show(page: Page, *summaries: str) -> None:
    """Open what has these summaries, one after the other."""
    for text in summaries:
        page.locator("summary", has_text=text).first.click()
        unfolded(page)


def unfolded(page: Page) -> None:
    """Wait until all opened parts are there; Playwright's own wait uses eval, which the pages forbid."""
    page.evaluate(
        """async () => {
            const waits = () => [...document.querySelectorAll("[data-part]")].some(p => p.closest("details").open)
                || document.querySelector("[aria-busy=true]")
                || [...document.querySelectorAll("[data-source][open] code")]
                .some(code => code.textContent.startsWith("It unfolds"));
            while (waits()) await new Promise(requestAnimationFrame);
        }"""
    )


# Contrast of text to its background, as in WCAG 2. A canvas converts colours from any notation. Figures have the
# background of the page or card.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true }), known = new Map();
  const rgba = colour => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const ground = element => {
    const own = rgba(getComputedStyle(element).backgroundColor);
    if (own[3] === 1) return own;
    return over(own, element.parentElement ? ground(element.parentElement) : rgba("Canvas"));
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const poor = new Set();
  let seen = 0;
  for (const element of document.querySelectorAll("body, body *:not(script)")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), below = ground(element);
    const text = over(rgba(element.closest("svg") ? style.fill : style.color), below);
    const [low, high] = [light(text), light(below)].sort((a, b) => a - b), ratio = (high + .05) / (low + .05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
    seen += 1;
    if (ratio < (large ? 3 : 4.5)) poor.add(`${ratio.toFixed(2)} ${element.tagName}.${element.className.baseVal
      ?? element.className}: ${element.textContent.trim().slice(0, 40)}`);
  }
  return [seen, rgba(getComputedStyle(document.body).backgroundColor), [...poor]];
}"""
