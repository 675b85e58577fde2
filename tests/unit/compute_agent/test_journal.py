# SPDX-License-Identifier: Apache-2.0
"""The agent's journal: what survives a restart, and what is never written."""

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


def test_results_and_fences_survive_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new" / "agent.db")
    written = result(error="é", details="why")
    journal.end(written)
    journal.close()
    again = Journal(tmp_path / "new" / "agent.db")
    assert again.find("a/build/1") == written
    assert again.find("a/build/2") is None
    assert again.fences() == {"s": 3}
    again.close()


def test_the_highest_fence_is_kept() -> None:
    journal = Journal(":memory:")
    for fence in (3, 7, 5):
        journal.end(result(f"a/build/{fence}", fence=fence))
    journal.end(result("b/build/1", server="other", fence=1))
    assert journal.fences() == {"s": 7, "other": 1}


def test_a_guest_that_was_made_off_is_not_said_to_run() -> None:
    """Its host did that. What else was said of it, or of others, is said again."""
    journal = Journal(":memory:")
    others = (
        result("b/build/1", server="other"),
        Result("a/stop/1", "s", 4, "done", {"power_state": 4}),
        Result("a/snapshot/1", "s", 4, "done", {"size": 1}),
    )
    for one in (result(), *others):
        journal.end(one)
    journal.forget_running("s")
    assert journal.find("a/build/1") is None
    assert tuple(journal.find(one.key) for one in others) == others


def test_begun_is_not_ended() -> None:
    journal = Journal(":memory:")
    assert not journal.has_begun("a/nmi/1")
    journal.begin("a/nmi/1")
    journal.begin("a/nmi/1")
    assert journal.has_begun("a/nmi/1")
    assert journal.find("a/nmi/1") is None
    journal.end(result("a/nmi/1"))
    assert journal.find("a/nmi/1") == result("a/nmi/1")


def test_a_later_result_of_a_command_replaces_the_earlier() -> None:
    journal = Journal(":memory:")
    journal.end(result(status="unknown"))
    journal.end(result())
    found = journal.find("a/build/1")
    assert found is not None
    assert found.status == "done"


def test_what_is_older_than_a_week_is_purged_when_it_is_opened(tmp_path: Path) -> None:
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
    again = Journal(path)
    assert again.find("old/build/1") is None
    assert again.find("new/build/1") is not None
    assert again.fences() == {"here": 3}
    again.close()


def test_neither_arguments_nor_secrets_are_written(tmp_path: Path) -> None:
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
    ended = verbs.run(journal, tools, new_command(verb, step="build"), verb)
    assert ended is not None
    assert ended.status == "done"
    journal.close()
    everything = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"do/a/build/1" in everything
    assert b"SECRET" not in everything


def test_many_threads_share_it(tmp_path: Path) -> None:
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
