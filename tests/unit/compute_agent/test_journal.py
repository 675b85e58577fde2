# SPDX-License-Identifier: Apache-2.0
"""The agent's journal on SQLite: results, fences and begun commands, and the absence of secrets."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from common.domain.models import GuestSpec, Result
from common.domain.verbs import EnsureGuest
from common.domain.wire import from_wire
from compute_agent import verbs
from compute_agent.journal import KEEP_DAYS, Journal
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.script import QUIET
from tests.verbs import new_command


def result(key: str = "a/build/1", server: str = "s", fence: int = 3, **more: str) -> Result:
    return Result(key, server, fence, more.pop("status", "done"), {"power_state": 1}, **more)


def test_journal_keeps_results_and_fences_over_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "agent.db")
    original = result(error="é", details="why")
    journal.end(original)
    journal.close()
    reopened = Journal(tmp_path / "new" / "agent.db")
    assert reopened.find("a/build/1") == original
    assert reopened.find("a/build/2") is None
    assert reopened.fences() == {"s": 3}
    reopened.close()


def test_journal_keeps_highest_fence_of_each_server() -> None:
    journal = Journal(":memory:")
    for fence in (3, 7, 5):
        journal.end(result(f"a/build/{fence}", fence=fence))
    journal.end(result("b/build/1", server="other", fence=1))
    assert journal.fences() == {"s": 7, "other": 1}


def test_forget_running_removes_only_results_of_running_guest_of_server() -> None:
    """Other results, also of other servers, are still reported."""
    journal = Journal(":memory:")
    others = (
        result("b/build/1", server="other"),
        Result("a/stop/1", "s", 4, "done", {"power_state": 4}),
        Result("a/snapshot/1", "s", 4, "done", {"size": 1}),
    )
    for other in (result(), *others):
        journal.end(other)
    journal.forget_running("s")
    assert journal.find("a/build/1") is None
    assert tuple(journal.find(other.key) for other in others) == others


def test_journal_begin_records_no_result() -> None:
    journal = Journal(":memory:")
    assert not journal.has_begun("a/nmi/1")
    journal.begin("a/nmi/1")
    journal.begin("a/nmi/1")
    assert journal.has_begun("a/nmi/1")
    assert journal.find("a/nmi/1") is None
    journal.end(result("a/nmi/1"))
    assert journal.find("a/nmi/1") == result("a/nmi/1")


def test_journal_replaces_earlier_result_of_command() -> None:
    journal = Journal(":memory:")
    journal.end(result(status="unknown"))
    journal.end(result())
    stored = journal.find("a/build/1")
    assert stored is not None
    assert stored.status == "done"


def test_journal_purges_entries_beyond_keep_days_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    journal = Journal(path)
    for key, server in (("old/build/1", "gone"), ("new/build/1", "here")):
        journal.end(result(key, server))
    journal.close()
    with sqlite3.connect(path) as database:
        for statement in (
            "UPDATE results SET at = at - ? WHERE key = 'old/build/1'",
            "UPDATE fences SET at = at - ? WHERE server = 'gone'",
        ):
            database.execute(statement, ((KEEP_DAYS + 1) * 86400,))
    database.close()
    reopened = Journal(path)
    assert reopened.find("old/build/1") is None
    assert reopened.find("new/build/1") is not None
    assert reopened.fences() == {"here": 3}
    reopened.close()


def test_journal_contains_no_arguments_and_no_secrets(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "agent.db")
    flavor = {"id": "1", "name": "n", "vcpus": 1, "memory_mb": 1, "root_gb": 1}
    guest = {
        "server": "s",
        "fence": 1,
        "name": "n",
        "flavor": flavor,
        "user_data": "SECRET-user-data",
        "instance": {"admin_pass": "SECRET-password"},
    }
    tools = verbs.Tools(MemoryDriver(), lambda image: iter(()), lambda image: list, QUIET)
    verb = EnsureGuest(guest=from_wire(GuestSpec, guest))
    outcome = verbs.run(journal, tools, new_command(verb, step="build"), verb)
    assert outcome is not None
    assert outcome.status == "done"
    journal.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"do/a/build/1" in content
    assert b"SECRET" not in content


def test_journal_keeps_highest_fence_of_each_server_when_several_threads_write(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "agent.db")

    def write(number: int) -> None:
        for fence in range(10):
            journal.end(result(f"{number}/build/{fence}", f"s{number}", fence))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert journal.fences() == {f"s{number}": 9 for number in range(8)}
    journal.close()
