# SPDX-License-Identifier: Apache-2.0
"""Processes accept the sample configurations.

These are deploy/samples/controller.conf and agent.conf.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

import conductor.service
import scheduler.service
from common.security import image_tickets, tls
from common.service import config
from compute_agent import assembly
from compute_api.compute import service as api
from deploy.one_machine.cloud.authority import Authority

SAMPLES = Path(__file__).resolve().parents[3] / "deploy/samples"


@pytest.fixture
def load(tmp_path: Path) -> Iterator[object]:
    def load_sample(name: str, process: str, **changed: str) -> cfg.ConfigOpts:
        text = (SAMPLES / name).read_text()
        for old, new in changed.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text)
        return config.load(str(path), process)

    yield load_sample
    config.CONF.clear_override("state_dir")
    config.CONF.clear()


def test_sample_configuration_of_controller_is_accepted_by_its_processes(load) -> None:
    conf = load("controller.conf", "conductor", KEYSTONE="keystone.example")
    conductor.service.check_options(conf)
    scheduler.service.options(conf)
    api.settings(conf)
    image_tickets.configured(conf)
    tls.check_external_urls(conf)
    from common.rpc.broker import configure
    from common.store.connections import protection

    configure(conf)
    assert protection(conf) is None
    assert conf.state_dir == config.STATE


def test_sample_configuration_of_agent_is_accepted_by_agent(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority(tmp_path).issue("own", "127.0.0.1")
    whole = Path(files.cert).read_text() + Path(files.key).read_text()
    (tmp_path / "host.pem").write_text(whole)
    monkeypatch.setenv("OS_AGENT__DRIVER", "memory")
    monkeypatch.setenv("OS_MIGRATION__LIVE_MIGRATION_INBOUND_ADDR", "127.0.0.1")
    monkeypatch.setenv("OS_MIGRATION__TRANSFER_PORT", "0")
    conf = load(
        "agent.conf", "agent", **{"/etc/kilonova": str(tmp_path), config.AGENT_STATE: str(tmp_path)}
    )
    assert conf.state_dir == config.AGENT_STATE
    conf.set_override("state_dir", str(tmp_path))
    driver = assembly.make_driver(conf)
    transfer = assembly.make_transfer(conf, driver)[0]
    transfer.close()
    assert tls.of(conf) is not None
