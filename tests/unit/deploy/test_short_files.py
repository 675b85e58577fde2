# SPDX-License-Identifier: Apache-2.0
"""The configuration that docs/install.md writes on a controller.

Secrets and certificates are in files of their own. Processes accept the configuration, and ``config
show`` names the origin of each value.
"""

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
#: Commands of the page that need root and the users of the packages.
OF_ROOT = re.compile(r"^(install|chgrp) .*$", re.MULTILINE)
Load = Callable[[str], cfg.ConfigOpts]


@pytest.fixture
def configuration_folder(tmp_path: Path) -> Path:
    """Return the folder in place of /etc/kilonova, after the commands of the page."""
    # On a controller, systemd-tmpfiles creates these folders.
    for folder in ("secrets", "tls"):
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
def load(configuration_folder: Path) -> Iterator[Load]:
    yield lambda process: config.load(str(configuration_folder / "kilonova.conf"), process)
    # An agent ignores the folders of secrets, so this resets them.
    config.load(str(configuration_folder / "kilonova.conf"), config.AGENT)
    config.CONF.clear()


def test_controller_accepts_configuration_of_install_page(
    configuration_folder: Path, load: Load
) -> None:
    conf = load("conductor")
    conductor.service.check_options(conf)
    protected = tls.protecting(conf, "[metadata] host", [conf.metadata.host], listens=True)
    assert protected is not None and protected.cert == str(configuration_folder / "tls/own.pem")
    assert Signer.read(conf.tls.ca_file, conf.tls.ca_key_file)
    assert conf.metadata.host == conf.image_gateway.host == "192.0.2.10"
    assert conf.image_gateway.url == "https://192.0.2.10:9293"
    secrets = {conf.secret_key, conf.host_keys.command_secret, conf.host_keys.query_secret}
    assert len(secrets) == 3 and {len(secret) for secret in secrets} == {64}
    assert conf.metadata.proxy_shared_secret == "proxy"


def test_config_show_names_origin_of_values_from_files(
    configuration_folder: Path, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(configuration_folder / "kilonova.conf")
    assert main.main(["--config", path, "config", "show", "--set", "--json"]) == 0
    output = capsys.readouterr().out
    origins = {row["option"]: row["from"] for row in json.loads(output)}
    assert origins["[tls] ca_file"] == f"found in {configuration_folder / 'tls'}"
    assert origins["[host_keys] query_secret"] == str(
        configuration_folder / "secrets/host_keys.query_secret"
    )
    assert origins["[image_gateway] url"] == "from [DEFAULT] my_ip"
    assert origins["[DEFAULT] my_ip"] == f"{path}:3"
    assert (configuration_folder / "secrets/DEFAULT.secret_key").read_text().strip() not in output


def test_configured_ca_file_and_image_gateway_host_replace_all_defaults(
    configuration_folder: Path, load: Load
) -> None:
    path = configuration_folder / "kilonova.conf"
    path.write_text(
        path.read_text() + "[image_gateway]\nhost = 192.0.2.9\nurl = https://images.example\n"
        f"[tls]\nca_file = {configuration_folder}/tls/ca.pem\n"
    )
    conf = load("image-gateway")
    assert (conf.image_gateway.host, conf.image_gateway.url) == (
        "192.0.2.9",
        "https://images.example",
    )
    assert (conf.tls.cert_file, conf.tls.ca_key_file) == ("", ""), "all of one place, or none"


def test_missing_certificates_are_refused_and_not_replaced_by_plain_text(
    configuration_folder: Path, load: Load
) -> None:
    (configuration_folder / "tls/ca.pem").unlink()
    (configuration_folder / "tls/own.pem").unlink()
    conf = load("conductor")
    with pytest.raises(errors.ConfigError, match="no loopback address"):
        tls.protecting(conf, "[metadata] host", [conf.metadata.host], listens=True)


def test_agent_ignores_certificates_and_secrets_of_controller(
    configuration_folder: Path, load: Load
) -> None:
    (configuration_folder / "kilonova.conf").write_text("[DEFAULT]\nhost = node7\n")
    conf = load(config.AGENT)
    assert (conf.tls.ca_file, conf.secret_key) == ("", "")


def test_secret_readable_by_others_or_configured_twice_is_refused(
    configuration_folder: Path, load: Load
) -> None:
    (configuration_folder / "secrets").chmod(0o755)
    with pytest.raises(errors.ConfigError, match="chmod o="):
        load("conductor")
    (configuration_folder / "secrets").chmod(0o750)
    (configuration_folder / "secrets/identity.password").write_text("again")
    with pytest.raises(errors.ConfigError, match=r"conf:9: \[identity\] password"):
        load("conductor")


def test_reload_reads_changed_secret_file(configuration_folder: Path, load: Load) -> None:
    load("metadata")
    (configuration_folder / "secrets/metadata.proxy_shared_secret").write_text("another")
    assert config.reread("metadata") == ["metadata.proxy_shared_secret"]
    assert config.CONF.metadata.proxy_shared_secret == "another"
