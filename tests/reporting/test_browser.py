"""The report in a real browser, from disk, with the network off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import attnlens
from attnlens import EffectiveAttention, HeadStatistics, HiddenTokenAttribution, Lens
from attnlens.reporting import fitting
from tests.support import models
from tests.support.browser import offline_browser

ARTEFACTS = Path(os.environ.get("ATTNLENS_ARTEFACTS", Path(__file__).parents[2] / "build"))
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
    with offline_browser() as chrome:
        yield chrome


@pytest.fixture(scope="module")
def seen():
    model = models.build("bert")
    maps = EffectiveAttention()
    attribution = HiddenTokenAttribution(2, keep="matrices")
    with Lens(model, HeadStatistics(), maps, attribution) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    return lens


def opened(browser, results, folder, tokens, scheme="light", **choices):
    page = folder / "report.html"
    attnlens.report(results, tokens=tokens, model=str(folder / "tiny"), **choices).save(page)
    assert str(folder) not in page.read_text()
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())
    drawn(browser)


def drawn(browser):
    """Wait until the page shows what was chosen last."""
    busy = "const p = document.getElementById('page'); return p && p.getAttribute('aria-busy')"
    WebDriverWait(browser, 1200).until(lambda b: b.execute_script(busy) == "false")


def choose(browser, **choices):
    for name, choice in choices.items():
        Select(browser.find_element(By.ID, name)).select_by_value(str(choice))
    drawn(browser)


def written(value, decimals):
    """A computed value to so many decimals, without a sign where all of them are zero."""
    return f"{round(value, decimals) + 0.0:.{decimals}f}"


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
    found = WebDriverWait(browser, 1200).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, f"#{plot} .hoverlayer .hovertext")
    )
    return found[0].text


def read_maps(browser, maps, place, decimals):
    """Hover a cell of all three maps and compare with what was computed."""
    layer, head, example, query, key = place
    choose(browser, example=example, layer=layer, head=head)
    raw, effective = (
        m[example, head, query, key].item() for m in (maps[layer].raw, maps[layer].effective)
    )
    for axes, value in (("x", raw), ("x2", effective), ("x3", raw - effective)):
        text = hover(browser, "maps", key, query, axes)
        letter = "ab"[example]
        assert f"{letter}{query} → {letter}{key}" in text
        assert text.rsplit("= ", 1)[1].replace("−", "-") == written(value, decimals)


TOKENS = [[f"a{i}" for i in range(19)], [f"b{i}" for i in range(6)]]
PLACES = ((1, 2, 1, 4, 2), (0, 0, 0, 18, 5))


def test_a_person_can_look_around(browser, seen, tmp_path):
    opened(browser, seen, tmp_path, TOKENS)
    maps = seen.observers[1].compute()
    for place in PLACES:
        read_maps(browser, maps, place, 6)
    choose(browser, token=4)
    text = hover(browser, "attribution", 2, 1)
    share = seen.observers[2].matrices[0].contribution[1, 0, 2, 4].item()
    assert "a2 in layer 1" in text and f"contributes {100 * share:.2f} %" in text
    grid = seen.observers[0].compute().effective_fraction
    text = hover(browser, "overview", 2, 1)
    assert float(text.split()[-1]) == pytest.approx(grid[1, 2].item(), rel=1e-3)
    ARTEFACTS.mkdir(exist_ok=True)
    assert browser.save_screenshot(str(ARTEFACTS / "report.png"))
    assert browser.get_log("browser") == []


def test_rounded_maps_say_no_more_than_they_know(browser, seen, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "DECIMALS", (3,))
    opened(browser, seen, tmp_path, TOKENS, scheme="dark")
    read_maps(browser, seen.observers[1].compute(), PLACES[1], 3)
    ground = "return getComputedStyle(document.body).backgroundColor"
    assert browser.execute_script(ground) == "rgb(20, 23, 27)"
    assert browser.save_screenshot(str(ARTEFACTS / "report-dark.png"))
    assert browser.get_log("browser") == []


def test_a_head_that_is_not_there_is_named(browser, seen, tmp_path):
    opened(browser, seen, tmp_path, None, heads=[1])
    assert browser.find_element(By.ID, "dots").is_displayed()
    choose(browser, head=2)
    assert "not in the file" in browser.find_element(By.ID, "absent").text
    assert not browser.find_element(By.ID, "maps").is_displayed()


def test_keys_alone_choose_everything(browser, seen, tmp_path):
    opened(browser, seen, tmp_path, TOKENS)
    choose(browser, layer=0, head=0, example=0)
    browser.execute_script("document.getElementById('field').focus()")
    press(browser, Keys.TAB)
    assert browser.switch_to.active_element == browser.find_element(By.ID, "overview")
    press(browser, Keys.RIGHT, Keys.RIGHT, Keys.DOWN)
    assert Select(browser.find_element(By.ID, "head")).first_selected_option.text == "2"
    assert Select(browser.find_element(By.ID, "layer")).first_selected_option.text == "1"
    browser.execute_script("document.getElementById('example').focus()")
    press(browser, "2")
    assert "example 2" in browser.find_element(By.ID, "maps-title").text


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()
    drawn(browser)


def test_hostile_tokens_run_nothing(browser, seen, tmp_path):
    opened(browser, seen, tmp_path, [(HOSTILE * 3)[:19], HOSTILE[:6]])
    assert HOSTILE[0] in hover(browser, "maps", 0, 0)
    for choice in (1, 6, 8):
        choose(browser, token=choice)
    assert browser.execute_script("return window.hacked") is None
    assert not browser.find_elements(By.CSS_SELECTOR, "main img, main a, nav img")
    assert browser.get_log("browser") == []
