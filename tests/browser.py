"""A page of headless Chromium, and the server whose pages it opens."""

import os
import re
import shutil
import signal
from contextlib import contextmanager

import pytest
from playwright.sync_api import expect, sync_playwright

expect.set_options(timeout=30_000)  # not 5 s: other tests run at the same time


#: The token of the servers that `serving` starts.
TOKEN = "a-token-of-the-tests"


@contextmanager
def serving(clusterctl, *arguments, page=None):
    """Yield the URL of `clusterctl serve`, which must end with 130 after Ctrl-C.

    `page` opens the URL with the token first, and leaves it before the end.
    """
    clusterctl.env["CLUSTERCTL_TOKEN"] = TOKEN
    process = clusterctl.start("serve", "--port", "0", *arguments)
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        if page:
            page.goto(url)
        yield url.removesuffix(f"?token={TOKEN}")
    finally:
        if page:
            page.goto("about:blank")
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=20)
        print(text, end="")  # also if the test fails
    assert (process.returncode, text) == (130, "")


@pytest.fixture(scope="module")
def chromium():
    path = shutil.which("chromium")
    if not path:
        assert os.environ.get("CI") != "true", "no chromium in PATH"
        pytest.skip("no chromium in PATH (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page, in which each error, message and request to another address fails the test."""
    problems = []
    page = chromium.new_page(viewport={"width": 380, "height": 800})
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: "//localhost:" in request.url or problems.append(request.url))
    yield page
    page.close()
    assert not problems, problems
