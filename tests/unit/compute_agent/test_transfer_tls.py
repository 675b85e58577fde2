# SPDX-License-Identifier: Apache-2.0
"""Transfers over TLS with real certificates: each side refuses a peer without a valid one."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.domain import errors
from common.domain.errors import ConfigError
from common.security.tls import Tls, load
from compute_agent.verb_context import VerbFailed
from deploy.one_machine.cloud import authority
from tests.unit.compute_agent.transfer_rig import Rig, read_whole

DAY = datetime.timedelta(days=1)
CONTENT = bytes(range(256)) * 8192


class Authority(authority.Authority):
    """An authority in a separate folder, which signs certificates of hosts."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / name, name)

    def tls(
        self, name: str, address: str = "127.0.0.1", valid: datetime.timedelta = 60 * DAY
    ) -> Tls:
        """Issue a certificate for a host with this address, and return the files."""
        return self.issue(name, address, valid=valid)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def rig(tmp_path: Path, ours: Authority) -> Iterator[Rig]:
    yield from serve(tmp_path, ours.tls("source"))


def serve(folder: Path, tls: Tls | None) -> Iterator[Rig]:
    rig = Rig(folder / "files", tls=tls)
    (rig.files.path / "disk").write_bytes(CONTENT)
    yield rig
    rig.service.close()


def test_transfer_tls_serves_host_with_valid_certificate(rig: Rig, ours: Authority) -> None:
    assert (
        read_whole(rig.peer(tls=ours.tls("destination", "10.0.0.9")), "disk", len(CONTENT))
        == CONTENT
    )


def test_transfer_tls_refuses_reader_without_tls(rig: Rig) -> None:
    with pytest.raises(VerbFailed) as failed:
        rig.peer().parts()
    assert "over TLS only" in failed.value.details
    assert rig.files.reads == []


def test_transfer_reader_with_tls_refuses_plain_text_service(
    tmp_path: Path, ours: Authority
) -> None:
    for rig in serve(tmp_path, None):
        with pytest.raises(VerbFailed) as failed:
            rig.peer(tls=ours.tls("destination")).parts()
        assert "transfer_cert" in failed.value.details


def test_transfer_tls_refuses_reader_with_certificate_of_other_authority(
    rig: Rig, ours: Authority, tmp_path: Path
) -> None:
    others = Authority(tmp_path, "others").tls("destination")
    with pytest.raises(VerbFailed, match="copied intact"):
        rig.peer(tls=replace(others, ca=str(ours.path))).parts()
    assert rig.files.reads == []


def test_transfer_tls_refuses_reader_with_expired_certificate(rig: Rig, ours: Authority) -> None:
    with pytest.raises(VerbFailed, match="copied intact"):
        rig.peer(tls=ours.tls("destination", valid=-DAY)).parts()
    assert rig.files.reads == []


@pytest.mark.parametrize("wrong", ["authority", "address", "expired"])
def test_transfer_reader_refuses_source_with_invalid_certificate(
    tmp_path: Path, ours: Authority, wrong: str
) -> None:
    tls = {
        "authority": lambda: replace(
            Authority(tmp_path, "others").tls("source"), ca=str(ours.path)
        ),
        "address": lambda: ours.tls("source", "127.0.0.2"),
        "expired": lambda: ours.tls("source", valid=-DAY),
    }[wrong]()
    for rig in serve(tmp_path, tls):
        with pytest.raises(VerbFailed) as failed:
            rig.peer(tls=ours.tls("destination")).parts()
        assert "TLS" in failed.value.details and "ertificate" in failed.value.details
        assert rig.files.reads == []


def test_transfer_tls_uses_new_certificates_at_once(rig: Rig, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "ours")
    renewed = Authority(tmp_path, "ours")
    renewed.tls("source")
    assert read_whole(rig.peer(tls=renewed.tls("destination")), "disk", len(CONTENT)) == CONTENT


def test_transfer_tls_serves_no_file_when_its_key_is_missing(
    rig: Rig, ours: Authority, tmp_path: Path
) -> None:
    mine = ours.tls("destination")
    Path(ours.tls("source").key).unlink()
    with pytest.raises(errors.Unavailable):
        rig.peer(tls=mine).parts()
    with pytest.raises((VerbFailed, errors.Unavailable)):
        rig.peer().parts()
    with pytest.raises(VerbFailed, match="cannot prove itself"):
        rig.peer(tls=replace(mine, key=str(tmp_path / "missing"))).parts()


def test_tls_load_refuses_invalid_mismatched_or_missing_files(
    ours: Authority, tmp_path: Path
) -> None:
    mine = ours.tls("source")
    assert load(mine.cert, mine.key, mine.ca) == mine
    for cert, key, ca in (
        (mine.key, mine.key, mine.ca),
        (mine.cert, ours.tls("another").key, mine.ca),
        (mine.cert, mine.key, str(tmp_path / "missing")),
    ):
        with pytest.raises(ConfigError, match="give PEM files"):
            load(cert, key, ca)
