# SPDX-License-Identifier: Apache-2.0
"""``kilonova broker add``, ``remove`` and ``restore``.

The tests cover the files that they write, the commands that they print for the broker, and the
patterns of permissions.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from common.security.broker_identities import of_host, of_role
from common.security.broker_names import API, CONDUCTOR, CONSOLE, ROLES, SCHEDULER
from common.store.engine import Store
from common.store.hosts import host_keys
from common.store.upgrades import upgrade
from deploy.one_machine.cloud.configuration import HEAD
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


def test_broker_restore_writes_users_of_hosts_and_processes(tmp_path: Path, capsys) -> None:
    store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(store)
    for host in ("h1", "h2"):
        store.write(lambda tx, host=host: host_keys.ensure(tx, host))
    store.close()
    conf, api, path = tmp_path / "k.conf", tmp_path / "api.conf", tmp_path / "users.json"
    conf.write_text(
        "[DEFAULT]\ntransport_url = rabbit://kilonova:S3CRET@127.0.0.1:5671/cloud\n"
        f"[database]\nurl = sqlite:///{tmp_path}/k.db\n[host_keys]\ncommand_secret = {'c' * 32}\n"
    )
    api.write_text("[DEFAULT]\ntransport_url = rabbit://kilonova-api:0THER@127.0.0.1:5671/cloud\n")
    words = ["broker", "restore", "--role-file", str(api), "--file", str(path)]
    assert main(["--config", str(conf), *words]) == 0
    output = capsys.readouterr()
    assert f"rabbitmqctl import_definitions < {path}" in output.out
    assert path.stat().st_mode & 0o777 == 0o600
    restored = json.loads(path.read_text())
    users = ["kilonova", "kilonova-api", "kilonova-host-h1", "kilonova-host-h2"]
    assert [user["name"] for user in restored["users"]] == users
    rights = {right["user"]: right for right in restored["permissions"]}
    assert {right["vhost"] for right in rights.values()} == {"cloud"}
    assert rights["kilonova"]["configure"] == ".*"
    assert rights["kilonova-api"]["read"] == of_role(API, "x").read
    for secret in ("S3CRET", "0THER"):
        assert secret not in path.read_text() + output.out + output.err
    api.write_text("[DEFAULT]\ntransport_url = rabbit://someone:x@127.0.0.1:5671/cloud\n")
    assert main(["--config", str(conf), *words]) == 1
    assert "someone in transport_url is not the user of a role" in capsys.readouterr().err


def test_broker_restore_of_one_machine_cloud_is_refused_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broker._derive_password derives other passwords of hosts than ``kilonova host add``."""
    conf, path = tmp_path / "k.conf", tmp_path / "users.json"
    upgrade(store := Store(f"sqlite:///{tmp_path}/k.db"))
    store.close()
    conf.write_text(
        f"{HEAD}[DEFAULT]\ntransport_url = rabbit://kilonova-conductor:S3CRET@127.0.0.1:5671/\n"
        f"[database]\nurl = sqlite:///{tmp_path}/k.db\n[host_keys]\ncommand_secret = {'c' * 32}\n"
    )
    assert main(["--config", str(conf), "broker", "restore", "--file", str(path)]) == 1
    assert "run ./deploy/down and ./deploy/up" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("kilonova-host.h1", True),
        ("kilonova-host.h1/1", True),
        ("kilonova-host.h1/3", True),
        ("kilonova-host.h1/4", False),
        ("kilonova-host.h1/1/1", False),
        ("kilonova-host.h11", False),
    ],
)
def test_host_reads_only_names_of_its_own_queue(name: str, may: bool) -> None:
    assert bool(re.search(of_host("h1", "x").read, name)) == may


@pytest.mark.parametrize(
    ("role", "kind", "name", "may"),
    [
        (CONDUCTOR, "write", "told", True),
        (CONDUCTOR, "write", "mine.info", True),
        (CONDUCTOR, "write", "nova", False),
        (CONDUCTOR, "read", "kilonova-host.h1", False),
        (CONDUCTOR, "configure", "kilonova-host.h1/2", True),
        (CONDUCTOR, "read", "kilonova-reports/2", True),
        (CONDUCTOR, "read", "kilonova-reports/x", False),
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
