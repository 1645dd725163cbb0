"""The documentation: its code runs, its links hold, and its search answers."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from attnlens.cli.commands import app
from attnlens.demo import model_folder, paragraphs
from tests.support.pages import chrome

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p.relative_to(DOCS / "pages").as_posix() for p in (DOCS / "pages").rglob("*.md"))
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUESTIONS = {
    "which heads waste attention": "guides/which-heads.html",
    "write my own observer": "guides/own-observer.html",
    "fine-tuning with the Trainer": "guides/fine-tuning.html",
    "prune heads and save": "guides/pruning.html",
    "scan a corpus on several processes": "guides/corpus.html",
    "decoder generation": "guides/decoders.html",
    "threshold of the rank": "guides/threshold.html",
    "coming from BertViz": "guides/coming-from.html",
    "simplex witness": "api/attnlens.identifiability.simplex_witness.html",
    "supported architectures": "architectures.html",
    "format of files": "how/files.html",
    "limits on a GPU": "limits.html",
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return FENCED.findall((DOCS / "pages" / page).read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What pages take for granted: two models, a text and a corpus."""
    shutil.copytree(model_folder(), tmp_path / "model")
    shutil.copytree(model_folder(), tmp_path / "finetuned")
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs()[:3]), encoding="utf-8")
    records = "".join(json.dumps({"text": text}) + "\n" for text in paragraphs()[:4])
    (tmp_path / "sentences.jsonl").write_text(records, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_the_code_of_a_page_runs_from_top_to_bottom(page, folder):
    assert {language for language, _ in blocks(page)} <= {"python", "sh", "text"}
    code = [text for language, text in blocks(page) if language == "python"]
    (folder / "page.py").write_text("\n".join(code), encoding="utf-8")
    runpy.run_path("page.py")
    shell = "\n".join(text for language, text in blocks(page) if language == "sh")
    finished = subprocess.run(
        ["bash", "-e", "-c", shell], capture_output=True, text=True, timeout=3600, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_every_command_is_shown():
    shell = "\n".join(text for page in PAGES for language, text in blocks(page) if language == "sh")
    shown = set(re.findall(r"^attnlens ([a-z]+)", shell, re.MULTILINE))
    assert shown == {command.name for command in typer.main.get_group(app).commands.values()}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings as errors."""
    out = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", DOCS / "mkdocs.yml"]
    finished = subprocess.run(
        [*build, "-d", out],
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "WARNING" not in finished.stderr
    return out


class Links(HTMLParser):
    """Targets of links and pictures, and the places that can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.targets += [named[name] for name in ("href", "src") if named.get(name)]
        self.anchors |= {named[name] for name in ("id", "name") if named.get(name)}


def test_no_link_is_broken(site):
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            other = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = pages[other].anchors if other in pages else {parts.fragment}
            if not other.exists() or (parts.fragment and parts.fragment not in anchors):
                broken.append(f"{page.relative_to(site)} → {target}")
    assert not broken
    assert len(pages) > 100


def test_every_public_name_has_a_page(site):
    named = runpy.run_path(str(DOCS / "site.py"))["public_names"]()
    paths = [path for names in named.values() for path in names.values()]
    assert len(paths) > 100
    for path in paths:
        assert f'<h1 id="{path}"' in (site / "api" / f"{path}.html").read_text(encoding="utf-8")


def test_nothing_is_fetched_from_elsewhere(site):
    for page in (site / "index.html", site / "how" / "mathematics.html"):
        loaded = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert not loaded


def test_the_search_answers_twelve_questions(site):
    assert len(QUESTIONS) == 12
    with chrome() as browser:
        browser.get((site / "index.html").as_uri())
        query = browser.find_element(By.NAME, "query")
        for question, page in QUESTIONS.items():
            browser.execute_script(
                "arguments[0].focus(); arguments[0].value = arguments[1];"
                "arguments[0].dispatchEvent(new Event('input', {bubbles: true}));"
                "arguments[0].dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));",
                query,
                question,
            )
            WebDriverWait(browser, 600).until(lambda b, page=page: page in first_results(b))


def first_results(browser) -> str:
    """Where the three best results lead."""
    found = browser.find_elements(By.CSS_SELECTOR, ".md-search-result__item > a")
    return " ".join(link.get_attribute("href") or "" for link in found[:3])
