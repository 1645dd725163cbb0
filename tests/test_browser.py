"""The report in a real browser, from disk, with the network off."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

import attnlens
from attnlens import EffectiveAttention, HeadStatistics, HiddenTokenAttribution, Lens
from tests import models

ARTEFACTS = Path(os.environ.get("ATTNLENS_ARTEFACTS", Path(__file__).parent.parent / "build"))
HOSTILE = [
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "<b>bold</b>",
    "&lt;i&gt;",
    "javascript:window.hacked=1",
    "<a href='javascript:window.hacked=1'>x</a>",
    "\u202etxt\u2028\u2029",
    "%{z}",
    "'\"`${window.hacked=1}",
]


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        message = "needs Debian's chromium and chromium-driver: apt-get install them"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1400,1700"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver)
    with webdriver.Chrome(options=options, service=service) as chrome:
        chrome.set_network_conditions(offline=True, latency=0, throughput=0)
        yield chrome


@pytest.fixture(scope="module")
def seen():
    model = models.build("bert")
    maps = EffectiveAttention()
    attribution = HiddenTokenAttribution(2, keep="matrices")
    with Lens(model, HeadStatistics(), maps, attribution) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    return lens


def opened(browser, lens, folder, tokens):
    page = folder / "report.html"
    attnlens.report(lens, tokens=tokens, model=str(folder / "tiny")).save(page)
    assert str(folder) not in page.read_text()
    browser.get(page.as_uri())
    WebDriverWait(browser, 30).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, "#maps .heatmaplayer")
    )


def hover(browser, plot, column, row, axes="x"):
    """Move the pointer onto a cell and read what appears."""
    element = browser.find_element(By.ID, plot)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    x, y = browser.execute_script(
        "const g = document.getElementById(arguments[0]), l = g._fullLayout, "
        "a = l[arguments[3] + 'axis'] || l['xaxis' + arguments[3].slice(1)];"
        "const r = g.getBoundingClientRect();"
        "return [r.left + a._offset + a.d2p(arguments[1]),"
        "r.top + l.yaxis._offset + l.yaxis.d2p(arguments[2])]",
        plot, column, row, axes,
    )  # fmt: skip
    actions = ActionChains(browser)
    actions.w3c_actions.pointer_action.move_to_location(int(x) + 3, int(y) + 3)
    actions.w3c_actions.pointer_action.move_to_location(int(x), int(y))
    actions.perform()
    found = WebDriverWait(browser, 10).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, f"#{plot} .hoverlayer .hovertext")
    )
    return found[0].text


def test_a_person_can_look_around(browser, seen, tmp_path):
    tokens = [[f"a{i}" for i in range(19)], [f"b{i}" for i in range(6)]]
    opened(browser, seen, tmp_path, tokens)
    for layer, head, example, query, key in ((0, 0, 0, 3, 5), (1, 2, 1, 4, 2), (0, 3, 0, 18, 0)):
        for name, choice in (("example", example), ("layer", layer), ("head", head)):
            Select(browser.find_element(By.ID, name)).select_by_value(str(choice))
        maps = seen.observers[1].compute()[layer]
        raw, effective = (m[example, head, query, key].item() for m in (maps.raw, maps.effective))
        for axes, value in (("x", raw), ("x2", effective), ("x3", raw - effective)):
            text = hover(browser, "maps", key, query, axes)
            letter = "ab"[example]
            assert f"{letter}{query} → {letter}{key}" in text
            shown = float(text.rsplit("=", 1)[1].replace("−", "-"))
            assert shown == pytest.approx(float(f"{value:.4g}"), rel=1e-9, abs=1e-7)
    ARTEFACTS.mkdir(exist_ok=True)
    assert browser.save_screenshot(str(ARTEFACTS / "report.png"))
    assert browser.get_log("browser") == []


def test_arrow_keys_choose_a_head(browser, seen, tmp_path):
    opened(browser, seen, tmp_path, None)
    grid = browser.find_element(By.ID, "overview")
    browser.execute_script("arguments[0].focus()", grid)
    ActionChains(browser).send_keys("\ue014", "\ue014", "\ue015").perform()  # right, right, down
    assert Select(browser.find_element(By.ID, "head")).first_selected_option.text == "2"
    assert Select(browser.find_element(By.ID, "layer")).first_selected_option.text == "1"


def test_hostile_tokens_run_nothing(browser, seen, tmp_path):
    tokens = [(HOSTILE * 3)[:19], HOSTILE[:6]]
    opened(browser, seen, tmp_path, tokens)
    assert HOSTILE[0] in hover(browser, "maps", 0, 0)
    for choice in range(9):
        Select(browser.find_element(By.ID, "token")).select_by_value(str(choice))
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements(By.CSS_SELECTOR, "main img, main a, nav img")
    assert browser.get_log("browser") == []
