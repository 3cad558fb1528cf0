"""The site that `make docs` builds: it needs no other host, no page is wider than a screen, and search finds words."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import playwright.sync_api
import pytest

from tests.browser import chromium as chromium  # fixtures
from tests.browser import page as page

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}/"
    server.shutdown()
    server.server_close()


def pages(site):
    return sorted(str(file.parent.relative_to(site)) for file in site.rglob("index.html"))


def test_no_file_names_another_host_for_a_script_a_style_a_font_or_an_image(site):
    loaded = re.compile(
        r"<(?:script|img|iframe|link(?! rel=.canonical))[^>]*(?:src|href)=\"?(?:https?:)?//[^\s>\"]+"
        r"|(?:url\(|@import )[\"']?(?:https?:)?//[^)\s]+"
    )
    files = [file for kind in ("html", "css", "svg") for file in site.rglob(f"*.{kind}")]
    assert len(files) > 40
    assert not [(file.name, found) for file in files for found in loaded.findall(file.read_text())]
    assert not [file for file in site.rglob("*.html") if re.search("class=.?mermaid", file.read_text())]


def test_no_page_asks_another_host_or_is_wider_than_the_screen(site, address, page):
    """The fixture `page` fails for requests to other hosts. The theme's scripts move its menus after the load."""
    wide = "[document.scrollingElement, ...document.querySelectorAll('pre > code')].filter(each => each.scrollWidth > "
    wide += "each.clientWidth + 1).map(each => each.textContent)"
    too_wide = []
    for path in pages(site):
        page.goto(f"{address}{path}/")
        assert page.evaluate("[...document.images].every(each => each.naturalWidth)"), (
            f"{path}: an image is broken"
        )
        for width in (400, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            try:
                page.wait_for_function(f"!{wide}.length", timeout=3000)
            except playwright.sync_api.TimeoutError:
                too_wide.append((width, path, [text[:50] for text in page.evaluate(wide)]))
    assert not too_wide


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("hyperparameter", "reference/configuration/"),
        ("ultralytics", "how-to/from-ultralytics/"),
        ("yolov8", "how-to/from-ultralytics/"),
        ("conda", "how-to/any-program/"),
        ("singularity", "getting-started/slurm/"),
        ("troubleshooting", "how-to/troubleshooting/"),
        ("quickstart", ""),
        ("out of memory", "how-to/troubleshooting/"),
        ("early stopping", "how-to/train/"),
        ("prometheus", "how-to/metrics/"),
        ("firewall", "how-to/troubleshooting/"),
        ("resume training", "how-to/failures/"),
    ],
)
def test_search_has_the_right_page_first(address, page, words, first):
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}design/testbed/?q={words}")
    result = page.locator(".md-search-result__item a.md-search-result__link").first
    result.wait_for()
    assert result.get_attribute("href").removeprefix(address).split("#")[0].split("?")[0] == first
