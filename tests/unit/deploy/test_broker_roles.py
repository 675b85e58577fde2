# SPDX-License-Identifier: Apache-2.0
"""``kilonova broker add`` and ``remove``.

The tests cover the file of a role, the commands that they print for the broker, and the patterns of
a role's permissions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.security.broker_identities import of_role
from common.security.broker_names import API, CONDUCTOR, CONSOLE, ROLES, SCHEDULER
from deploy.operator.main import main


def run_broker(folder: Path, *words: str) -> int:
    conf = folder / "kilonova.conf"
    conf.write_text(
        "[DEFAULT]\ntransport_url = rabbit://kilonova:S3CRET@127.0.0.1:5671/cloud\n"
        "control_exchange = told\n[notifications]\nversioned_notifications_topics = mine\n"
    )
    return main(["--config", str(conf), "broker", *words])


@pytest.mark.parametrize("role", ROLES)
def test_broker_add_writes_role_file_and_prints_commands_for_its_user(
    tmp_path: Path, capsys, role: str
) -> None:
    path = tmp_path / "file.conf"
    assert run_broker(tmp_path, "add", role, "--file", str(path)) == 0
    output = capsys.readouterr()
    match = re.fullmatch(
        rf"\[DEFAULT\]\ntransport_url = rabbit://kilonova-{role}:([0-9a-f]{{48}})@127.0.0.1:5671/cloud\n",
        path.read_text(),
    )
    assert match is not None and path.stat().st_mode & 0o777 == 0o600
    assert match[1] not in output.out + output.err and "S3CRET" not in output.out + output.err
    identity = of_role(
        role, "x", calls="told", notifications="told", topics=("notifications", "mine")
    )
    assert f"rabbitmqctl add_user kilonova-{role}" in output.err
    assert "rabbitmqctl set_permissions -p cloud" in output.err and identity.write in output.err
    assert output.err.count("set_topic_permissions") == len(identity.topics)
    assert run_broker(tmp_path, "remove", role) == 0
    assert f"rabbitmqctl delete_user kilonova-{role}" in capsys.readouterr().err


def test_broker_add_refuses_unknown_role(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_broker(tmp_path, "add", "metadata")


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
def test_broker_role_permissions_match_whole_resource_names(
    role: str, kind: str, name: str, may: bool
) -> None:
    identity = of_role(
        role, "x", calls="told", notifications="told", topics=("notifications", "mine")
    )
    assert bool(re.search(getattr(identity, kind), name)) == may
