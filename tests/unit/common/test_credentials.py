# SPDX-License-Identifier: Apache-2.0
"""Options that come from the credentials folder of systemd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from common.domain import errors
from common.rpc.broker import address_of
from common.service import config


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Return a function that loads a file of these lines together with these credentials."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))

    def write_and_load(*lines: str, **credentials: str) -> cfg.ConfigOpts:
        for name, text in credentials.items():
            (folder / name.replace("__", ".")).write_text(text)
        path = tmp_path / "kilonova.conf"
        path.write_text("\n".join(lines) + "\n")
        return config.load(str(path))

    yield write_and_load
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    # Loading without the folder removes the credentials from the configuration.
    config.load(str(tmp_path / "kilonova.conf"))
    config.CONF.clear()


def test_systemd_credential_sets_the_option_of_its_name(load) -> None:
    conf = load(
        "[identity]",
        "username = k",
        identity__password="pa$$ $word\n",
        DEFAULT__secret_key="long",
        DEFAULT__transport_url="rabbit://u:p$x@somewhere:1/",
        other="x",
        another__thing="y",
    )
    assert (conf.identity.password, conf.secret_key) == ("pa$$ $word", "long")
    [broker] = address_of(conf).hosts
    assert (broker.hostname, broker.password) == ("somewhere", "p$x")


def test_systemd_credential_of_unknown_option_is_refused_naming_nearest(load) -> None:
    with pytest.raises(
        errors.ConfigError, match="credential identity.pasword.*nearest is password"
    ):
        load(identity__pasword="x")


def test_systemd_credential_with_wrong_option_value_is_refused(load) -> None:
    with pytest.raises(errors.ConfigError, match="port"):
        load(api__port="many")


@pytest.mark.parametrize("name", ["DEFAULT__my_ip", "image_gateway__port"])
def test_malformed_credential_of_address_or_port_raises_config_error(load, name: str) -> None:
    values = {"DEFAULT__my_ip": "192.0.2.10", name: "no address: or port"}
    with pytest.raises(errors.ConfigError, match=f"credential {name.replace('__', '.')}: "):
        load(**values)


def test_credential_takes_precedence_over_value_derived_from_my_ip(load) -> None:
    conf = load(
        "[DEFAULT]",
        "my_ip = 192.0.2.10",
        metadata__host="192.0.2.11",
        image_gateway__url="https://images.example",
    )
    assert (conf.metadata.host, conf.image_gateway.url) == ("192.0.2.11", "https://images.example")
    assert conf.image_gateway.host == "192.0.2.10"
    assert config.origins(conf)["metadata.host"] == "credential metadata.host"


def test_option_in_both_file_and_systemd_credential_is_refused(load) -> None:
    with pytest.raises(
        errors.ConfigError, match=r"conf:2: \[identity\] password is also a credential"
    ):
        load("[identity]", "password = x", identity__password="y")
