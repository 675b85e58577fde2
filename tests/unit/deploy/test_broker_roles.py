# SPDX-License-Identifier: Apache-2.0
"""``kilonova broker add|remove``: the file of a role, and what is to be done at the broker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.security.broker_identities import of_role
from common.security.broker_names import API, CONDUCTOR, CONSOLE, ROLES, SCHEDULER
from deploy.operator.main import main


def gives(folder: Path, *words: str) -> int:
    conf = folder / "kilonova.conf"
    conf.write_text(
        "[DEFAULT]\ntransport_url = rabbit://kilonova:S3CRET@127.0.0.1:5671/cloud\n"
        "control_exchange = told\n[notifications]\nversioned_notifications_topics = mine\n"
    )
    return main(["--config", str(conf), "broker", *words])


@pytest.mark.parametrize("role", ROLES)
def test_a_role_gets_a_file_and_the_commands_for_its_user(
    tmp_path: Path, capsys, role: str
) -> None:
    path = tmp_path / "file.conf"
    assert gives(tmp_path, "add", role, "--file", str(path)) == 0
    told = capsys.readouterr()
    found = re.fullmatch(
        rf"\[DEFAULT\]\ntransport_url = rabbit://kilonova-{role}:([0-9a-f]{{48}})@127.0.0.1:5671/cloud\n",
        path.read_text(),
    )
    assert found is not None and path.stat().st_mode & 0o777 == 0o600
    assert found[1] not in told.out + told.err and "S3CRET" not in told.out + told.err
    identity = of_role(
        role, "x", calls="told", notifications="told", topics=("notifications", "mine")
    )
    assert f"rabbitmqctl add_user kilonova-{role}" in told.err
    assert "rabbitmqctl set_permissions -p cloud" in told.err and identity.write in told.err
    assert told.err.count("set_topic_permissions") == len(identity.topics)
    assert gives(tmp_path, "remove", role) == 0
    assert f"rabbitmqctl delete_user kilonova-{role}" in capsys.readouterr().err


def test_a_role_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        gives(tmp_path, "add", "metadata")


@pytest.mark.parametrize(
    ("role", "kind", "name", "may"),
    [
        (CONDUCTOR, "write", "told", True),
        (CONDUCTOR, "write", "mine.info", True),
        (CONDUCTOR, "write", "nova", False),
        (CONDUCTOR, "read", "kilonova-host.h1", False),
        (SCHEDULER, "write", "kilonova", False),
        (API, "read", "kilonova", False),
        (CONSOLE, "configure", "kilonova", False),
        (SCHEDULER, "write", "told", False),
        (CONSOLE, "configure", "told", False),
        (API, "configure", "told", True),
        (API, "configure", "reply_kilonova-api_" + "0" * 32, True),
        (API, "read", "reply_" + "0" * 32, False),
        (SCHEDULER, "read", "kilonova-scheduler.h/1", True),
        (SCHEDULER, "read", "kilonova-schedulers", False),
    ],
)
def test_names_are_matched_whole(role: str, kind: str, name: str, may: bool) -> None:
    identity = of_role(
        role, "x", calls="told", notifications="told", topics=("notifications", "mine")
    )
    assert bool(re.search(getattr(identity, kind), name)) == may
