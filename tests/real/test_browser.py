"""The pages of `clusterctl serve` in Chromium, while a job on the testbed loses a node."""

import time

import pytest
from playwright.sync_api import expect

from tests.browser import chromium, page, serving
from tests.real.test_faults import cluster

__all__ = ["chromium", "cluster", "page"]

pytestmark = pytest.mark.real


def test_the_page_shows_a_killed_node_within_10_s_and_the_restart(cluster, page):
    cluster.launch("shown", "--max-restarts", "1", epochs=400)  # until it is stopped
    cluster.until_step()
    with serving(cluster.clusterctl, page=page) as url:
        page.goto(url)
        expect(page.get_by_role("link", name="shown")).to_be_visible(timeout=30_000)
        page.keyboard.press("Tab")  # the table, which may scroll
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs/shown/")
        expect(page.locator("h1")).to_have_text("shown: running")
        expect(page.get_by_role("img", name="loss over the epochs")).to_be_visible(timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        page.locator("#ranks summary").click()  # closed, also after the next polls
        cluster.testbed["n1"].run("docker kill $(docker ps -q --filter label=CLUSTER_JOB_ID=shown)")
        killed = time.time()
        expect(page.locator("body")).to_contain_text("n1: exit 137 (killed)", timeout=10_000)
        print(f"shown {time.time() - killed:.1f} s after the kill")
        expect(page.locator("body")).to_contain_text("attempt 2", timeout=30_000)
        expect(page.get_by_text("ready", exact=True)).to_have_count(2, timeout=60_000)
        assert page.locator("#ranks").get_attribute("open") is None
        page.get_by_role("link", name="n1").click()
        page.wait_for_url("**/logs/n1")
        expect(page.locator("#log")).to_contain_text("--- attempt 2 ---")
    assert cluster.clusterctl.run("stop", "shown")[0] == 0
    cluster.process.communicate(timeout=60)
