"""What the agent writes to logs instead of secrets. Events are read back as the launcher reads them."""

import json

import pytest

from cluster.agent.app.node_agent.masking import Mask, stays_visible
from cluster.backends import logs
from cluster.contract import EVENT_MARK
from cluster.supervisor import launcher

JOINING = {"event": "joining", "time": 1764175000.8, "node": 0, "master": "127.0.0.1:8888", "reachable": True}
JOINING |= {"listening": False, "why": "", "path": "/home/ann/8", "shares": {"data": [0.5, None, "8"]}}
COMPACT = (",", ":")


def fields_of(line):
    """Return the JSON of the event in a line, which the launcher takes for one."""
    assert logs.event(line) is not None
    return json.loads(line.partition(EVENT_MARK)[2])


def masked(text, *secrets):
    return Mask(secrets).line(text.encode()).decode()


@pytest.mark.parametrize(
    "secret",
    [
        *("true", "false", "True", "8", "8888", "1764", "1764175000.8", "null"),
        *("::cluster", "::cluster ", "cluster", "joining", "event", "reachable", "node", "shares"),
        *('":', '{"event"', '":true', ',"node":0', '"reachable":true,', "}", "[1]", '"joining"', "\\", "\n"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[1] ", "text before 8888 "])
def test_no_secret_changes_the_structure_of_an_event(secret, prefix):
    found = fields_of(masked(f"{prefix}::cluster {json.dumps(JOINING, separators=COMPACT)}", secret))
    strings = ("master", "path", "why")
    assert {key: found[key] for key in found if key not in strings} == {
        key: JOINING[key] for key in JOINING if key not in strings
    }
    assert found.keys() == JOINING.keys()


SECRETS = ("hunter2", 'quo"te', "back\\slash", "pässwörd-€", "tab\there", "sla/sh", "emoji 🔑", "two\nlines")


@pytest.mark.parametrize(
    ("secret", "ascii_only"),
    [(secret, how) for secret in SECRETS for how in (True, False)] + [("\udce9 no UTF-8", True)],
)
def test_a_secret_in_the_string_of_an_event_is_masked(secret, ascii_only):
    event = {
        "event": "failed",
        "error": f"token {secret}!",
        "more": [{"x": secret}],
        "inner": json.dumps({"y": secret}),
    }
    found = fields_of(masked(f"::cluster {json.dumps(event, ensure_ascii=ascii_only)}", secret))
    assert found == {
        "event": "failed",
        "error": "token ***!",
        "more": [{"x": "***"}],
        "inner": '{"y": "***"}',
    }


@pytest.mark.parametrize(
    ("text", "secrets", "expected"),
    [
        ("abcd abcdef abc", ["abcd", "abcdef"], "*** *** abc"),
        ("the key: -----BEGIN-----", ["-----BEGIN-----\nMIIE\n-----END-----\n"], "the key: ***"),
        ("MIIE", ["-----BEGIN-----\r\nMIIE\r\n-----END-----\r\n"], "***"),
        ("token=hunter2.", ["  hunter2\n"], "token=***."),
        ("loss 0.8888 at /home/ann/8888/x", ["8888"], "loss 0.*** at /home/ann/***/x"),
        ("it is true: off, 8, Offline", ["true", "off", "8", "OFFLINE"], "it is true: off, 8, Offline"),
        ('{"password": "a\\"b\\\\c"}', ['a"b\\c'], '{"password": "***"}'),
        ("a.*c is no pattern, abbc", ["a.*c"], "*** is no pattern, abbc"),
        ("nothing", ["", " ", "\n"], "nothing"),
        ("::cluster {hunter2", ["hunter2"], "::cluster {***"),
        ("::cluster [1] hunter2", ["hunter2"], "::cluster [1] ***"),
    ],
)
def test_secrets_in_text_are_masked_longest_first_except_common_words(text, secrets, expected):
    assert masked(text, *secrets) == expected


def test_bytes_that_are_no_utf8_are_kept_and_masked():
    assert Mask(["\udce9-secret"]).line(b"\xff is not \xe9-secret") == b"\xff is not ***"


@pytest.mark.parametrize(
    "value", ["[" * 100_000, '{"event":"x","a":' + "[" * 5000 + "]" * 5000 + "}", "1" * 5000]
)
def test_an_event_that_no_parser_reads_is_text(value):
    line = f"::cluster {value} hunter2"
    assert masked(line, "hunter2") == line.replace("hunter2", "***")
    assert logs.event(line) is None


def test_an_event_that_is_nested_too_deeply_is_masked_as_text():
    """json.loads reads it. The agent, whose thread copies the rank's output, must not end."""
    line = f'::cluster {{"event":"x","a":{"[" * 700}"hunter2"{"]" * 700}}}'
    assert masked(line, "hunter2") == line.replace("hunter2", "***")


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("true", True),
        ("abc", True),
        ("a\nb", True),
        (" No ", True),
        ("", False),
        ("hunter2", False),
        ("ab\nhunter2", False),
    ],
)
def test_the_launch_names_the_variables_whose_values_logs_show(value, visible):
    assert stays_visible(value) == visible
    found = launcher.visible_secrets({"TOKEN": value})
    assert [text.split(":")[0] for text in found] == (["--env TOKEN"] if visible else [])
    assert value == "" or all(value not in text.split() for text in found)
