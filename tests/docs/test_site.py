"""The site builds without a warning, and its pages ask nothing of the network."""

import os
import re
import subprocess
import sys

import documentation
import pytest

REPOSITORY = "https://example.org/team/mindrlhf"


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    named = {**os.environ, "REPOSITORY_URL": REPOSITORY}
    done = subprocess.run(command, cwd=root, env=named, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    written = [page.removeprefix("docs/").replace(".md", ".html") for page in documentation.pages()[1:]]
    for name in (*written, "settings.html", "commands.html"):
        assert (site / name).is_file(), name


def test_nothing_comes_from_elsewhere(site):
    """Links may lead away; scripts, styles, fonts and pictures are the site's own."""
    for path in [*site.rglob("*.html"), *site.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?([^\"' >]+)", text)
        fetched += re.findall(r"<link\b[^>]*?\bhref=[\"']?([^\"' >]+)", text)
        assert path.suffix == ".svg" or fetched
        assert [url for url in fetched if re.match(r"(?:https?:)?//", url)] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path


def test_the_header_has_the_repository_and_a_switch_of_themes(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    assert f'href="{REPOSITORY}"' in text
    assert re.findall(r'data-md-color-scheme="(\w+)"[^>]*id="__palette_', text) == ["default", "default", "slate"]


def test_tables_are_in_place(site):
    text = (site / "from_verl.html").read_text(encoding="utf-8")
    assert "<!-- table" not in text
    assert "<code>algorithm.updates_per_iteration</code>" in text


def test_pages_fit_a_phone(site, browser):
    """Pictures load, nothing is wider than the screen, and the console has nothing to say; 404 needs a server."""
    for page in {*site.rglob("*.html")} - {site / "404.html"}:
        browser.open(page.as_uri(), width=390, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390, page
        broken = "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
        assert browser.run(broken) == [], page
        assert browser.errors == [], page
