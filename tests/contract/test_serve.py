"""`clusterctl serve` over a real job: what a browser receives, and what it is refused."""

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request

import pytest
from playwright.sync_api import expect

from tests.browser import TOKEN, chromium, page, serving
from tests.contract.sshd import TICKS
from tests.contract.test_backends import Local

__all__ = ["chromium", "page"]


class Events:
    """The server-sent events of a page, collected by a thread."""

    def __init__(self, url):
        self.messages = []
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
        self._answer = urllib.request.urlopen(request, timeout=30)
        assert self._answer.headers["Content-Type"] == "text/event-stream"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for line in self._answer:
                if line.startswith(b"data: "):
                    self.messages.append(json.loads(line[6:]))
        except (OSError, ValueError, http.client.HTTPException):
            pass

    def wait_for(self, is_there, timeout_s=30):
        until = time.time() + timeout_s
        while not any(map(is_there, self.messages)):
            assert time.time() < until, self.messages[-1:]
            time.sleep(0.1)


def fetch(url, *, has_token=True, **headers):
    """Return (status, headers, text), without following a redirect."""
    if has_token:
        headers["Authorization"] = f"Bearer {TOKEN}"
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.putrequest(
        "GET", url.removeprefix(f"http://{parts.netloc}") or "/", skip_host="Host" in headers
    )
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    try:
        return answer.status, answer.headers, answer.read().decode(errors="replace")
    finally:
        connection.close()


@pytest.fixture
def job(clusterctl, job_name):
    """A job of two ranks that restarts once."""
    shutil.copy(TICKS, clusterctl.folder)
    command = [
        "launch",
        "--backend",
        "local",
        "--name",
        job_name,
        "--nodes",
        "2",
        "--max-restarts",
        "1",
        "--detach",
    ]
    code, text = clusterctl.run(*command, "--command", "ticks.py --ticks-later 15")
    assert code == 0, text
    for node in ("node-0", "node-1"):
        clusterctl.wait_for(job_name, "tick 1", node=node)
    yield job_name
    clusterctl.run("stop", job_name)


def test_pages_follow_a_job_through_a_restart_to_its_end(clusterctl, job):
    supervisor = clusterctl.start("wait", job)
    with serving(clusterctl) as url:
        assert fetch(url)[0] == 200
        listed = Events(f"{url}events")
        page = Events(f"{url}jobs/{job}/events")
        log = Events(f"{url}jobs/{job}/logs/node-1/events?q=RANK%201")
        listed.wait_for(lambda body: f'href="jobs/{job}/"' in body and ">running<" in body)
        page.wait_for(lambda body: ">ready<" in body and "Attempts" not in body)
        page.wait_for(lambda body: "2 ranks" in body)
        log.wait_for(lambda lines: "tick 1: rank 1 of 2" in lines)
        Local().kill_node(job, 1)
        killed = time.time()
        page.wait_for(lambda body: "node-1: exit 137 (killed)" in body, 10)
        print(f"shown {time.time() - killed:.1f} s after the kill")
        page.wait_for(lambda body: f'{job}: <span class="done">' in body and "attempt 2" in body)
        listed.wait_for(lambda body: ">done<" in body)
        log.wait_for(lambda lines: "tick 14: rank 1 of 2" in lines)
        seen = [line for lines in log.messages for line in lines]
        assert seen.count("tick 0: rank 1 of 2") == 2
        assert all("rank 1" in line for line in seen)
    assert supervisor.wait(20) == 0
    supervisor.stdout.close()


def test_the_use_memory_and_temperature_of_a_gpu_are_lines_over_time(clusterctl, job_name, page, request):
    """Simulate a GPU in the output of nvidia-smi: 5 %, 1 GiB and 1 °C more at each query."""
    smi = clusterctl.folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        "#!/bin/sh\ncase $1 in --query-gpu=index) echo 0; exit ;; -L) echo 'GPU 0: A (UUID: GPU-0)'; exit ;; esac\n"
        f"echo >>{smi}.count; n=$(wc -l <{smi}.count)\n"
        "echo 0, GPU-0, $((5 * n)), $((1024 * n)), 81920, $((40 + n))\n"
    )
    smi.chmod(0o755)
    clusterctl.env |= {"PATH": f"{smi.parent}:{clusterctl.env['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
    clusterctl.env["CLUSTERCTL_LOCKS"] = str(clusterctl.folder / "locks")
    (clusterctl.folder / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    command = [
        "launch",
        "--backend",
        "local",
        "--name",
        job_name,
        "--gpus",
        "1",
        "--detach",
        "--command",
        "sleep.py",
    ]
    code, text = clusterctl.run(*command)
    assert code == 0, text
    request.addfinalizer(lambda: clusterctl.run("stop", job_name))
    with serving(clusterctl, page=page) as url:
        page.goto(f"{url}jobs/{job_name}/")
        for key, least in (("use", 5), ("memory", 1 << 30), ("temperature", 41)):
            line = page.get_by_label(re.compile(f"^{key}: "))
            expect(line.locator("polyline")).to_have_attribute(
                "points", re.compile(r"0,\S+ 1,\S+ 2,"), timeout=20_000
            )
            low, high = map(int, re.findall(r"\d+", line.get_attribute("aria-label")))
            assert least <= low < high
            heights = [
                float(point.split(",")[1])
                for point in line.locator("polyline").get_attribute("points").split()
            ]
            assert heights == sorted(heights, reverse=True)  # the values rise
            assert line.bounding_box()["width"] > 30
        # An update keeps the focus of the keyboard, the scroll position and what the user has closed.
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.evaluate("table = document.activeElement; table.scrollLeft = 10; ranks.open = false")
        old = line.get_attribute("aria-label")
        expect(line).not_to_have_attribute("aria-label", old)
        assert page.evaluate("[document.activeElement === table, table.className, ranks.open]") == [
            True,
            "wide",
            False,
        ]
        assert page.evaluate("table.scrollLeft") == 10


def test_files_of_the_run_directory_and_no_others(clusterctl, job):
    folder = clusterctl.folder / "runs" / job
    (folder / "<script>.png").write_bytes(b"\x89PNG")
    (folder / "page.html").write_text("<script>alert(1)</script>")
    (clusterctl.folder / "secret").write_text("secret")
    (folder / "link.csv").symlink_to(clusterctl.folder / "secret")
    with serving(clusterctl) as url:
        base = f"{url}jobs/{job}/"
        assert re.search(r'<img src="%3Cscript%3E.png\?\d+" alt="&lt;script&gt;.png"', fetch(base)[2])
        assert fetch(f"{base}%3Cscript%3E.png")[1]["Content-Type"] == "image/png"
        status, headers, text = fetch(f"{base}attempt-1/node-0.log")
        assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
        assert "tick 1: rank 0 of 2" in text
        status, headers, _ = fetch(f"{base}page.html")
        assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
        assert "sandbox" in headers["Content-Security-Policy"]
        for path in (
            "../../secret",
            "%2e%2e/%2e%2e/secret",
            "link.csv",
            "%00",
            "attempt-1",
            "/etc/passwd",
            "none.png",
        ):
            assert fetch(base + path)[0] == 404, path
        for path in ("jobs/none/", "jobs/none/events", "jobs/..%2fx/", f"jobs/{job}/logs/node-9", "none"):
            assert fetch(url + path)[0] == 404, path


def test_no_text_of_a_job_becomes_a_tag_and_no_script_without_the_nonce_runs(clusterctl, job_name, request):
    hostile = "<script>alert(1)</script>"
    (clusterctl.folder / "hostile.py").write_text(
        "import sys, time\nprint(sys.argv[1], flush=True)\ntime.sleep(60)\n"
    )
    command = [
        "launch",
        "--backend",
        "local",
        "--name",
        job_name,
        "--detach",
        "--command",
        f"hostile.py '{hostile}'",
    ]
    code, text = clusterctl.run(*command)
    assert code == 0, text
    request.addfinalizer(lambda: clusterctl.run("stop", job_name))
    with serving(clusterctl) as url:
        _, headers, text = fetch(f"{url}jobs/{job_name}/")
        nonce = re.search(r"script-src 'nonce-([\w-]+)'", headers["Content-Security-Policy"])[1]
        assert re.findall(r"<script[^>]*>", text) == [f'<script nonce="{nonce}">']
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert f"'nonce-{nonce}'" not in fetch(f"{url}jobs/{job_name}/")[1]["Content-Security-Policy"]
        log = Events(f"{url}jobs/{job_name}/logs/node-0/events")
        log.wait_for(lambda lines: hostile in lines)  # JSON, which the page shows as text
        assert not re.search(r"(https?:)?//[a-z]", fetch(url)[2])


def test_a_browser_shows_hostile_text_and_finds_lines_of_the_log(clusterctl, job_name, page, request):
    hostile = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    lines = f"import sys, time\nfor n in range(5000): print('line', n)\nprint({hostile!r}, flush=True)\n"
    (clusterctl.folder / "hostile.py").write_text(
        lines + "while True: time.sleep(1); print('later', flush=True)\n"
    )
    command = [
        "launch",
        "--backend",
        "local",
        "--name",
        job_name,
        "--detach",
        "--command",
        f"hostile.py '{hostile}'",
    ]
    assert clusterctl.run(*command)[0] == 0
    request.addfinalizer(lambda: clusterctl.run("stop", job_name))
    folder = clusterctl.folder / "runs" / job_name
    (folder / "results.csv").write_text(f"epoch,{hostile}_loss\n1,0.5\n2,0.25\n")
    (folder / "<img src=x onerror=alert(3)>.png").write_bytes(
        bytes.fromhex(
            "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63"
        )
        + bytes.fromhex("6460f85f0f0002870180eb47ba920000000049454e44ae426082")
    )
    with serving(clusterctl, page=page) as url:
        page.goto(f"{url}jobs/{job_name}/")
        expect(page.locator("code").first).to_contain_text(hostile)
        expect(page.locator("figcaption").first).to_have_text(f"loss{hostile} 0.25")
        expect(page.get_by_alt_text("<img src=x onerror=alert(3)>.png")).to_be_visible()
        page.get_by_role("link", name="node-0").click()
        log = page.locator("#log")
        expect(log).to_contain_text(hostile)
        expect(log).to_contain_text("later")
        page.get_by_role("searchbox").fill("LINE 42")
        expect(log).to_have_text(
            "\n".join(f"line {n}" for n in [42, *range(420, 430), *range(4200, 4300)]) + "\n"
        )


def test_another_site_cannot_read_the_pages_through_its_own_name(clusterctl):
    with serving(clusterctl) as url:
        assert fetch(url, Host="evil.example")[0] == 403
        assert fetch(url, Host="localhost:9999")[0] == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_every_address_needs_the_token(clusterctl, host):
    (clusterctl.folder / "records").mkdir()
    with serving(clusterctl, "--metrics", "--host", host) as url:
        for path in (
            "",
            "events",
            "metrics",
            "jobs/none/",
            "?token=",
            "?token=wrong",
            f"?token={TOKEN[:-1]}",
        ):
            status, _, text = fetch(url + path, has_token=False)
            assert (status, text) == (
                403,
                "open the URL with the token that clusterctl serve has printed\n",
            ), path
        for header in (
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer wrong"},
            {"Cookie": "clusterctl="},
        ):
            assert fetch(url, has_token=False, **header)[0] == 403, header
        status, headers, _ = fetch(f"{url}metrics?token={TOKEN}", has_token=False)
        assert (status, headers["Location"]) == (303, "/metrics")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie  # browsers also send it to other users' servers on this machine
        name, value = cookie.split(";")[0].split("=")
        assert name == f"clusterctl-{urllib.parse.urlsplit(url).port}"
        assert fetch(url, has_token=False, Cookie=f"{name}={value}")[0] == 200
        for wrong in (f"{name}={value[:-1]}", f"{name}={TOKEN}", f"clusterctl-1={value}", f"{name}"):
            assert fetch(url, has_token=False, Cookie=wrong)[0] == 403, wrong
        status, headers, _ = fetch(f"{url}/evil.example?token={TOKEN}", has_token=False)
        assert (status, headers["Location"]) == (303, "/evil.example")


def test_the_token_is_a_new_one_at_each_start_or_that_of_the_variable(clusterctl):
    clusterctl.env.pop("CLUSTERCTL_TOKEN", None)
    tokens = set()
    for _ in range(2):
        process = clusterctl.start("serve", "--port", "0")
        tokens.add(re.search(r"\?token=([\w-]{32})  ", process.stdout.readline())[1])
        process.terminate()
        process.communicate(timeout=20)
    assert len(tokens) == 2
    for bad in ("too-short", "has a space in it, too", "ä" * 20):
        clusterctl.env["CLUSTERCTL_TOKEN"] = bad
        code, text = clusterctl.run("serve", "--port", "0")
        assert (code, bad in text, "Traceback" in text) == (2, False, False)


@pytest.mark.parametrize("host", ["[::1", "localhost:x", "localhost:99999", "[]"])
def test_a_malformed_host_is_a_bad_request(clusterctl, host):
    with serving(clusterctl) as url:
        status, _, text = fetch(url, Host=host)
        assert (status, "malformed" in text) == (400, True)
        assert fetch(url)[0] == 200


def test_a_malformed_address_is_a_bad_request(clusterctl):
    with serving(clusterctl) as url:
        address = urllib.parse.urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
            connection.sendall(b"GET http://[::1 HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b" 400 " in connection.makefile("rb").readline()


def test_prometheus_scrapes_a_running_job_with_the_token(clusterctl, job, tmp_path):
    prometheus = shutil.which("prometheus")
    if not prometheus:
        assert os.environ.get("CI") != "true", "no prometheus in PATH"
        pytest.skip("no prometheus in PATH (apt-get install prometheus)")
    with serving(clusterctl, "--metrics", "--host", "127.0.0.2") as url:
        base = url.rstrip("/")
        assert fetch(f"{base}/metrics", has_token=False)[0] == 403
        config = {
            "job_name": "clusterctl",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [base[7:]]}],
        }
        config["authorization"] = {"credentials": TOKEN}
        (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [config]}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            listen = f"127.0.0.1:{probe.getsockname()[1]}"
        words = [prometheus, f"--config.file={tmp_path}/prometheus.yml", f"--web.listen-address={listen}"]
        process = subprocess.Popen(
            [*words, f"--storage.tsdb.path={tmp_path}/data"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:

            def found(query):
                with contextlib.suppress(OSError):
                    answer = fetch(f"http://{listen}/api/v1/query?query={urllib.parse.quote(query)}")[2]
                    return {
                        tuple(
                            row["metric"].get(name)
                            for name in ("job", "exported_job", "node", "rank", "state")
                        ): row["value"][1]
                        for row in json.loads(answer)["data"]["result"]
                    }
                return {}

            until = time.time() + 30
            while len(memory := found("clusterctl_rank_memory_bytes")) < 2:
                assert time.time() < until, memory
                time.sleep(0.5)
            assert set(memory) == {("clusterctl", job, f"node-{rank}", str(rank), None) for rank in (0, 1)}
            assert all(float(value) > 1 << 20 for value in memory.values())
            assert found("clusterctl_job_state") == {("clusterctl", job, None, None, "running"): "1"}
            assert found("clusterctl_job_nodes_ready") == {("clusterctl", job, None, None, None): "2"}
        finally:
            process.terminate()
            process.wait(20)


def test_the_webhook_receives_the_restart_and_the_end(clusterctl, job_name):
    received = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    shutil.copy(TICKS, clusterctl.folder)
    command = ["launch", "--backend", "local", "--name", job_name, "--nodes", "2", "--max-restarts", "1"]
    command += ["--command", "ticks.py --ticks-later 2 --fail-at 1"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        clusterctl.env["CLUSTERCTL_WEBHOOK"] = f"http://127.0.0.1:{server.server_address[1]}/SECRET"
        code, text = clusterctl.run(*command)
        server.shutdown()
    assert code == 1, text
    assert [(each["event"], each["attempt"]) for each in received] == [("restarted", 2), ("failed", 2)]
    assert (
        received[1]["text"] == f"{job_name}: failed: node-1: rank 1: ValueError: this rank fails on purpose"
    )
    code, text = clusterctl.run("launch", "--backend", "local", "--command", "ticks.py --ticks 1")
    assert code == 0, text
    assert "CLUSTERCTL_WEBHOOK: not sent: done: [Errno 111] Connection refused" in text
    assert "SECRET" not in text
    for url, why in (
        ("http://[SECRET", "not sent: done: "),
        ("SECRET.example", "expected a URL with http:// or https://"),
    ):
        clusterctl.env["CLUSTERCTL_WEBHOOK"] = url
        code, text = clusterctl.run("launch", "--backend", "local", "--command", "ticks.py --ticks 1")
        assert code == 0, text
        assert f"CLUSTERCTL_WEBHOOK: {why}" in text
        assert "SECRET" not in text
        assert "Traceback" not in text


def test_a_record_that_cannot_be_read_is_named_on_the_page_and_in_the_metrics(clusterctl):
    (clusterctl.folder / "records").mkdir()
    (clusterctl.folder / "records" / "broken.json").write_text("{")
    with serving(clusterctl, "--metrics") as url:
        assert "cannot read the job record" in fetch(url)[2]
        status, _, text = fetch(f"{url}metrics")
        assert status == 200
        assert 'clusterctl_job_state{backend="",job="broken",state="unreadable"} 1.0' in text


def test_a_port_in_use_is_one_error(clusterctl):
    with serving(clusterctl) as url:
        port = url.rstrip("/").rpartition(":")[2]
        code, text = clusterctl.run("serve", "--port", port)
    assert (code, text.splitlines()[0]) == (
        2,
        f"error: cannot listen on localhost:{port}: Address already in use",
    )
