# SPDX-License-Identifier: Apache-2.0
"""The plugin ``tests.failures``: evidence from the clouds of a failed test, since its start.

Most tests run pytest on a small ring in a subprocess and read its output.
"""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import evidence
from tests.unit.test_house_rules import ROOT

SERVER, ACTION, REQUEST, ANOTHER = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "abcd")
MOMENT = 1_700_000_000_000_000
#: A ring with used and unused session clouds, a cloud that fails to start, and failing tests.
RING = """
import pathlib, time, pytest
from tests import evidence, failures

class Home:
    def __init__(self, name, **more):
        self.name, self.more = name, more
        self.log = pathlib.Path(__file__).with_name(f"{name}.log")
        self.say("made")
        failures.register(self)
    def say(self, *lines):
        with self.log.open("a") as file:
            file.writelines(f"2026-01-01 {line}\\n" for line in lines)
    def bookmark(self):
        return evidence.sizes([self.log])
    def diagnosis(self, since):
        return {f"log of {self.name}": lambda: evidence.news([self.log], since), **self.more}

class Mute(Home):
    def diagnosis(self, since):
        raise KeyError("no titles")

@pytest.fixture(scope="session")
def used():
    return Home("used")

@pytest.fixture(scope="session")
def other():
    return Home("other")

@pytest.fixture
def guest(used):
    yield used
    used.say("ended")

@pytest.fixture
def unruly():
    home = Home("unruly")
    yield home
    home.say("while it ends")
    raise RuntimeError("not gone")

@pytest.fixture(scope="session")
def doomed():
    home = Home("doomed")
    try:
        with failures.diagnose_first(home):
            home.say("does not come up")
            pytest.fail("no broker", pytrace=False)
    finally:
        home.log.unlink()

@pytest.fixture(scope="session")
def broken_cloud():
    home = Home("cloud", hint=lambda: ["see the log"])
    yield pytest.fail("no guest", pytrace=False)

def test_first_of_broken_cloud(broken_cloud):
    pass

def test_second_of_broken_cloud(broken_cloud):
    pass

def test_that_passes(used, other):
    used.say("of the test before")

def test_of_a_cloud(guest):
    guest.say("of this test")
    assert not "the reason"

def test_of_no_cloud(doomed):
    pass

def test_ended_wrong(unruly):
    pass

def test_wrong_twice(unruly):
    assert not "the reason"

def broken():
    raise OSError("no doctor")

def test_with_a_bad_doctor(monkeypatch):
    diagnose = failures.diagnose
    monkeypatch.setattr(failures, "diagnose", lambda thing, since: diagnose(thing, since, patience=0.2))
    homes = Home("mine", failing=broken, hanging=lambda: time.sleep(60)), Mute("mute")
    assert not "the reason"

def test_of_much():
    home = Home("mine", much=lambda: ["x" * 1000] * 1000, more=lambda: ["y"])
    assert not "the reason"
"""


def run_ring(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Run pytest on the ring with the plugin and return the output."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_ring.py").write_text(RING)
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.failures",
            "-p",
            "no:cacheprovider",
            "-q",
            "--rootdir",
            str(folder),
            *arguments,
            str(folder / "test_ring.py"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **(env or {})},
    )
    assert process.returncode == 1, process
    return process.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ring")


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    junit = f"--junitxml={folder / 'junit.xml'}"
    return run_ring(folder, junit, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def part_of(output: str, *test: str) -> str:
    """Return the part of the output about one test."""
    [part] = re.findall(
        rf"^_+ {' '.join(test)} _+\n(.*?)^(?:___|===)", output, re.DOTALL | re.MULTILINE
    )
    return str(part)


def section(output: str, title: str) -> list[str]:
    """Return the lines below a title."""
    [lines] = re.findall(rf"^-+ {title} -+\n(.*?)(?:^---|\Z)", output, re.DOTALL | re.MULTILINE)
    return list(lines.splitlines())


def test_failure_report_shows_log_of_own_cloud_since_start_of_test(output: str) -> None:
    part = part_of(output, "test_of_a_cloud")
    assert section(part, "log of used") == ["used.log: 1 of 1 lines", "  2026-01-01 of this test"]
    assert (
        "log of other" not in output
        and "the reason" in part
        and "4 failed, 2 passed, 5 errors" in output
    )


def test_failure_report_in_junit_xml_has_the_same_evidence(output: str, folder: Path) -> None:
    [case] = ElementTree.parse(folder / "junit.xml").findall(".//testcase[@name='test_of_a_cloud']")
    assert section(str(case.findtext("failure")), "log of used") == section(
        part_of(output, "test_of_a_cloud"), "log of used"
    )


# ./deploy/test uses no workers of xdist, so the default set leaves this test out.
@pytest.mark.slice("operations")
def test_failure_report_from_xdist_worker_has_the_same_evidence(
    output: str, tmp_path: Path
) -> None:
    far = part_of(
        run_ring(tmp_path, "-n", "1", "-k", "that_passes or of_a_cloud"), "test_of_a_cloud"
    )
    assert section(far, "log of used") == section(part_of(output, "test_of_a_cloud"), "log of used")


def test_failure_report_of_unstarted_cloud_shows_its_log_before_removal(output: str) -> None:
    part = part_of(output, "ERROR at setup of", "test_of_no_cloud")
    assert section(part, "log of doomed") == [
        "doomed.log: 1 of 1 lines",
        "  2026-01-01 does not come up",
    ]
    assert "no broker" in part


def test_failed_fixture_of_two_tests_shows_its_evidence_once(output: str) -> None:
    first, second = (
        part_of(output, "ERROR at setup of", f"test_{name}_of_broken_cloud")
        for name in ("first", "second")
    )
    assert section(first, "hint") == ["see the log"]
    assert "no guest" in second and "hint" not in second


def test_teardown_failure_shows_evidence_unless_the_test_failed(output: str) -> None:
    part = part_of(output, "ERROR at teardown of", "test_ended_wrong")
    assert section(part, "log of unruly") == [
        "unruly.log: 1 of 1 lines",
        "  2026-01-01 while it ends",
    ]
    assert section(part_of(output, "test_wrong_twice"), "log of unruly") == ["nothing"]
    again = part_of(output, "ERROR at teardown of", "test_wrong_twice")
    assert "not gone" in again and "log of unruly" not in again


def test_failure_report_shows_other_evidence_when_a_source_fails_or_hangs(output: str) -> None:
    part = part_of(output, "test_with_a_bad_doctor")
    assert section(part, "failing") == ["could not be asked: OSError('no doctor')"]
    assert section(part, "hanging") == ["did not answer within 0.2 s"]
    assert section(part, "Mute") == ["could not be asked: KeyError('no titles')"]
    assert section(part, "log of mine") == ["nothing"] and "the reason" in part


def test_failure_report_cuts_long_evidence(output: str) -> None:
    lines = section(part_of(output, "test_of_much"), "much")
    assert (len(lines), len(lines[0]), lines[-1]) == (200, 301, "… 801 more lines")
    assert section(part_of(output, "test_of_much"), "more") == ["… 1 more lines"]


# --- evidence ---
def action(state: str, *, name: str = "resize", message: str | None = None) -> tuple[object, ...]:
    return (
        ACTION,
        SERVER,
        f"req-{REQUEST}",
        name,
        state,
        "do",
        "boot",
        2,
        "h1",
        MOMENT,
        MOMENT + 5_000_000,
        message,
    )


def test_evidence_describes_running_and_failed_actions() -> None:
    rows = [action("failed", message="no room"), action("done", name="stop"), action("waiting")]
    first, second = evidence.describe_actions(rows)
    assert first.startswith(f"server {SERVER} resize: waiting, do boot on h1, attempt 2, since ")
    assert f"req-{REQUEST}, action {ACTION}" in first and second.endswith(": no room")
    assert evidence.describe_actions([action("done")]) == ["none"]
    assert evidence.ids(rows) == {ACTION, SERVER, REQUEST}


def test_evidence_query_selects_running_actions_and_those_ended_since() -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(
            "CREATE TABLE actions (id, server_id, request_id, name, state, phase, step, attempt, "
            "host, created_at, updated_at, message)"
        )
        for name, state, at in (("old", "done", 1), ("ended", "done", 9), ("runs", "due", 1)):
            database.execute(
                "INSERT INTO actions (id, state, updated_at) VALUES (?, ?, ?)", (name, state, at)
            )
        rows = database.execute(evidence.query(since=5)).fetchall()
    assert {row[0] for row in rows} == {"ended", "runs"}


def test_evidence_of_log_prefers_lines_with_ids_and_errors(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    traceback = [
        "2026-01-01 ERROR it broke",
        "Traceback (most recent call last):",
        *(f"  File {number}" for number in range(20)),
        "ValueError: the cause",
    ]
    log.write_text(
        "\n".join(
            [
                "2026-01-01 INFO long ago",
                f"2026-01-01 INFO server {SERVER} boots",
                *traceback,
                f"2026-01-01 INFO server {ANOTHER} boots",
                *(f"2026-01-01 INFO beat {number}" for number in range(50)),
            ]
        )
    )
    before = {log: len("2026-01-01 INFO long ago\n")}
    heading, *lines = evidence.news([log], before, {SERVER})
    assert heading == "agent.log: 11 of 75 lines"
    assert [line.strip() for line in lines[:4]] == [
        f"2026-01-01 INFO server {SERVER} boots",
        traceback[0],
        "File 15",
        "File 16",
    ]
    assert lines[7] == "  ValueError: the cause" and lines[8:] == [
        f"  2026-01-01 INFO beat {number}" for number in range(47, 50)
    ]


def test_evidence_of_log_without_matches_shows_the_last_lines(tmp_path: Path) -> None:
    quiet, silent = tmp_path / "quiet.log", tmp_path / "silent.log"
    quiet.write_text("".join(f"2026-01-01 INFO beat {number}\n" for number in range(9)))
    silent.write_text("2026-01-01 ERROR long ago\n")
    assert evidence.news([quiet, silent], evidence.sizes([silent])) == [
        "quiet.log: 3 of 9 lines",
        *(f"  2026-01-01 INFO beat {number}" for number in (6, 7, 8)),
    ]


def test_evidence_of_rotated_log_shows_it_from_the_beginning(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("2026-01-01 INFO anew\n")
    assert evidence.news([log, tmp_path / "gone.log"], {log: 1 << 26}) == [
        "agent.log: 1 of 1 lines",
        "  2026-01-01 INFO anew",
    ]


def test_evidence_of_many_logs_shares_the_line_limit(tmp_path: Path) -> None:
    logs = [tmp_path / f"agent-{number}.log" for number in range(20)]
    for log in logs:
        log.write_text("2026-01-01 ERROR again\n" * 100)
    lines = evidence.news(logs, {})
    assert (
        len(lines) == evidence.ALL_LOGS + len(logs)
        and lines.count("agent-7.log: 6 of 100 lines") == 1
    )
