# SPDX-License-Identifier: Apache-2.0
"""The configuration that docs/install.md writes on a controller: processes accept it, and each
value has an origin."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

import conductor.service
from common.domain import errors
from common.security import tls
from common.security.certificates import Signer
from common.service import config
from deploy.operator import main
from tests.install.documentation import commands

PAGE = Path(__file__).resolve().parents[3] / "docs/install.md"
WORDS = {
    "CONTROLLER": "192.0.2.10",
    "KEYSTONE": "https://keystone.example:5000/v3",
    "PUBLIC": "https://cloud.example",
    "SERVICE": "service",
    "DATABASE": "database",
    "BROKER": "broker",
    "MANAGEMENT": "management",
    "PROXY": "proxy",
}
#: What only root and the packages' users can do.
OF_ROOT = re.compile(r"^(install|chgrp) .*$", re.MULTILINE)
Load = Callable[[str], cfg.ConfigOpts]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The folder that is /etc/kilonova, after the page's commands."""
    for folder in ("secrets", "tls"):  # as tmpfiles.d makes them
        (tmp_path / folder).mkdir(mode=0o750)
    for heading in ("Certificates", "Configuration"):
        script = OF_ROOT.sub("", commands(PAGE, heading)).replace("/etc/kilonova", str(tmp_path))
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={**os.environ, **WORDS},
            check=True,
            capture_output=True,
        )
    return tmp_path


@pytest.fixture
def load(written: Path) -> Iterator[Load]:
    yield lambda process: config.load(str(written / "kilonova.conf"), process)
    config.load(str(written / "kilonova.conf"), config.AGENT)  # which gives the folders up
    config.CONF.clear()


def test_a_controller_takes_what_the_page_writes(written: Path, load: Load) -> None:
    conf = load("conductor")
    conductor.service.check_options(conf)
    protected = tls.protecting(conf, "[metadata] host", [conf.metadata.host], listens=True)
    assert protected is not None and protected.cert == str(written / "tls/own.pem")
    assert Signer.read(conf.tls.ca_file, conf.tls.ca_key_file)
    assert conf.metadata.host == conf.image_gateway.host == "192.0.2.10"
    assert conf.image_gateway.url == "https://192.0.2.10:9293"
    secrets = {conf.secret_key, conf.host_keys.command_secret, conf.host_keys.query_secret}
    assert len(secrets) == 3 and {len(one) for one in secrets} == {64}
    assert conf.metadata.proxy_shared_secret == "proxy"


def test_show_names_the_origin_of_each(
    written: Path, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written / "kilonova.conf")
    assert main.main(["--config", path, "config", "show", "--set", "--json"]) == 0
    said = capsys.readouterr().out
    found = {row["option"]: row["from"] for row in json.loads(said)}
    assert found["[tls] ca_file"] == f"found in {written / 'tls'}"
    assert found["[host_keys] query_secret"] == str(written / "secrets/host_keys.query_secret")
    assert found["[image_gateway] url"] == "from [DEFAULT] my_ip"
    assert found["[DEFAULT] my_ip"] == f"{path}:3"
    assert (written / "secrets/DEFAULT.secret_key").read_text().strip() not in said


def test_what_the_file_says_counts(written: Path, load: Load) -> None:
    path = written / "kilonova.conf"
    path.write_text(
        path.read_text() + "[image_gateway]\nhost = 192.0.2.9\nurl = https://images.example\n"
        f"[tls]\nca_file = {written}/tls/ca.pem\n"
    )
    conf = load("image-gateway")
    assert (conf.image_gateway.host, conf.image_gateway.url) == (
        "192.0.2.9",
        "https://images.example",
    )
    assert (conf.tls.cert_file, conf.tls.ca_key_file) == ("", ""), "all of one place, or none"


def test_what_is_gone_is_no_plain_text(written: Path, load: Load) -> None:
    (written / "tls/ca.pem").unlink()
    (written / "tls/own.pem").unlink()
    conf = load("conductor")
    with pytest.raises(errors.ConfigError, match="no loopback address"):
        tls.protecting(conf, "[metadata] host", [conf.metadata.host], listens=True)


def test_an_agent_has_no_part_in_it(written: Path, load: Load) -> None:
    (written / "kilonova.conf").write_text("[DEFAULT]\nhost = node7\n")
    conf = load(config.AGENT)
    assert (conf.tls.ca_file, conf.secret_key) == ("", "")


def test_a_secret_that_is_open_or_double_is_refused(written: Path, load: Load) -> None:
    (written / "secrets").chmod(0o755)
    with pytest.raises(errors.ConfigError, match="chmod o="):
        load("conductor")
    (written / "secrets").chmod(0o750)
    (written / "secrets/identity.password").write_text("again")
    with pytest.raises(errors.ConfigError, match=r"conf:9: \[identity\] password"):
        load("conductor")


def test_a_changed_secret_is_read_again(written: Path, load: Load) -> None:
    load("metadata")
    (written / "secrets/metadata.proxy_shared_secret").write_text("another")
    assert config.reread("metadata") == ["metadata.proxy_shared_secret"]
    assert config.CONF.metadata.proxy_shared_secret == "another"
