"""A headless browser without a network, and what a person does with a page in it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from attnlens.reporting.page import Report

ROOT = Path(__file__).parents[2]
ARTEFACTS = Path(os.environ.get("ATTNLENS_ARTEFACTS", ROOT / "build"))
AXE = ROOT / "tests" / "web" / "node_modules" / "axe-core" / "axe.min.js"
PATIENCE = 1200  # seconds


@contextmanager
def chrome() -> Iterator[webdriver.Chrome]:
    """A browser that reaches no network."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.fail("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1400,1700"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        browser.set_network_conditions(offline=True, latency=0, throughput=0)
        yield browser


class Visit:
    """A page that is open in a browser.

    Args:
        browser: the browser.
        report: the page.
        folder: where it is saved.
        width: of the window, in pixels.
        scheme: `"light"` or `"dark"`.
        fragment: of the address.
    """

    def __init__(
        self,
        browser: webdriver.Chrome,
        report: Report,
        folder: Path,
        width: int = 1400,
        scheme: str = "light",
        fragment: str = "",
    ) -> None:
        self.browser = browser
        page = folder / "report.html"
        report.save(page)
        assert str(folder) not in report.html
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": 1500, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        downloads = {"behavior": "allow", "downloadPath": str(folder)}
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", downloads)
        browser.get("about:blank")
        browser.get(page.as_uri() + (f"#{fragment}" if fragment else ""))
        self.drawn()

    def drawn(self) -> None:
        """Wait until the page shows what was chosen last."""
        busy = "const p = document.getElementById('page'); return p && p.getAttribute('aria-busy')"
        WebDriverWait(self.browser, PATIENCE).until(lambda b: b.execute_script(busy) == "false")

    def script(self, source: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.browser.execute_script(source, *arguments)

    def find(self, selector: str) -> Any:
        """The first element of a selector."""
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        """All elements of a selector."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def choose(self, **choices: Any) -> None:
        """Choose from lists and checkboxes by their id."""
        for name, choice in choices.items():
            element = self.find(f"#{name}")
            if isinstance(choice, bool):
                if element.is_selected() != choice:
                    element.click()
            elif element.tag_name == "input":
                self.script(
                    "arguments[0].value = arguments[1];"
                    "arguments[0].dispatchEvent(new Event('change'))",
                    element,
                    str(choice),
                )
            else:
                Select(element).select_by_value(str(choice))
            self.drawn()

    def open(self, view: str) -> None:
        """Open a view by its tab."""
        self.click(f"#tab-{view}")

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        self.script("arguments[0].scrollIntoView({block: 'center'})", self.find(selector))
        self.find(selector).click()
        self.drawn()

    def focus(self, selector: str) -> None:
        """Put the focus on an element."""
        self.script("arguments[0].focus()", self.find(selector))

    def press(self, *keys: str) -> None:
        """Press keys where the focus is."""
        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()
            self.drawn()

    def point(self, element: Any, x: float = 0.5, y: float = 0.5) -> None:
        """Move the pointer to a place in an element, given as shares of its sides."""
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        left, top = self.script(
            "const r = arguments[0].getBoundingClientRect();"
            "return [r.left + arguments[1] * r.width, r.top + arguments[2] * r.height]",
            element, x, y,
        )  # fmt: skip
        actions = ActionChains(self.browser)
        actions.w3c_actions.pointer_action.move_to_location(int(left) + 1, int(top) + 1)
        actions.w3c_actions.pointer_action.move_to_location(int(left), int(top))
        actions.perform()

    def cell(self, figure: str, place: tuple[int, int], size: tuple[int, int]) -> str:
        """Point at a cell of a figure, and read what is said."""
        (row, column), (rows, columns) = place, size
        image = self.find(f"{figure} image")
        self.point(image, (column + 0.5) / columns, (row + 0.5) / rows)
        return str(self.find(f"{figure} .readout").text)

    def saved(self, name: str) -> Path:
        """Wait for a file that was saved, and return it."""
        folder = Path(self.script("return location.pathname")).parent
        path = next(iter(folder.glob(name)), None)
        WebDriverWait(self.browser, PATIENCE).until(lambda _: list(folder.glob(name)))
        return path or next(iter(folder.glob(name)))

    def require_sound(self, picture: str = "") -> None:
        """Require that nothing failed, anybody can use it, and nothing scrolls sideways."""
        assert self.browser.get_log("browser") == []
        assert self.script("return document.documentElement.scrollWidth <= innerWidth")
        if not AXE.is_file():
            pytest.fail("needs axe: npm ci --prefix tests/web")
        self.script(AXE.read_text(encoding="utf-8"))
        self.browser.set_script_timeout(PATIENCE)
        found = self.browser.execute_async_script(
            "axe.run(document).then((r) => arguments[arguments.length - 1](r.violations))"
        )
        assert not found, json.dumps(found, indent=1)[:4000]
        if picture:
            ARTEFACTS.mkdir(exist_ok=True)
            assert self.browser.save_screenshot(str(ARTEFACTS / f"{picture}.png"))


def number(text: str) -> tuple[float, float]:
    """The last number of a text, and by how much it may be rounded."""
    digits = re.findall(r"[−-]?\d+(?:\.\d+)?", text)[-1].replace("−", "-")
    return float(digits), 0.5 * 10.0 ** -len(digits.partition(".")[2])
