# SPDX-License-Identifier: Apache-2.0
"""Transfers over TLS: both sides are proved, or nothing is said."""
from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from common import errors
from compute_agent.transfer.tls import Tls, opened
from compute_agent.virt.driver import VerbFailed
from tests.unit.compute_agent.transfer_rig import Rig, whole

DAY = datetime.timedelta(days=1)
CONTENT = bytes(range(256)) * 8192


class Authority:
    """Signs certificates; ``folder`` gets the files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._builder(self._subject, self._key, DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(self._key, hashes.SHA256())
        self.path = self._write("ca", made.public_bytes(serialization.Encoding.PEM))

    def tls(self, name: str, address: str = "127.0.0.1", valid: datetime.timedelta = DAY) -> Tls:
        """The files of a host with this address."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = self._builder(subject, key, valid).add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False).sign(
            self._key, hashes.SHA256())
        return Tls(self._write(f"{name}-cert", cert.public_bytes(serialization.Encoding.PEM)),
                   self._write(f"{name}-key", key.private_bytes(
                       serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())),
                   self.path)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
                 ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            issuer_name=self._subject, subject_name=subject, public_key=key.public_key(),
            serial_number=x509.random_serial_number(), not_valid_before=now - 2 * DAY, not_valid_after=now + valid)

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / f"{self._name}-{name}.pem"
        path.write_bytes(content)
        return str(path)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def rig(tmp_path: Path, ours: Authority) -> Iterator[Rig]:
    yield from serving(tmp_path, ours.tls("source"))


def serving(folder: Path, tls: Tls | None) -> Iterator[Rig]:
    made = Rig(folder / "files", tls=tls)
    (made.files.path / "disk").write_bytes(CONTENT)
    yield made
    made.service.close()


def test_hosts_that_prove_themselves_are_served(rig: Rig, ours: Authority) -> None:
    assert whole(rig.peer(tls=ours.tls("destination", "10.0.0.9")), "disk", len(CONTENT)) == CONTENT


def test_reader_without_tls_gets_nothing(rig: Rig) -> None:
    with pytest.raises(VerbFailed) as failed:
        rig.peer().parts()
    assert "over TLS only" in failed.value.details
    assert rig.files.reads == []


def test_reader_with_tls_never_falls_back(tmp_path: Path, ours: Authority) -> None:
    for rig in serving(tmp_path, None):
        with pytest.raises(VerbFailed) as failed:
            rig.peer(tls=ours.tls("destination")).parts()
        assert "transfer_cert" in failed.value.details


def test_reader_of_another_authority_gets_nothing(rig: Rig, ours: Authority, tmp_path: Path) -> None:
    others = Authority(tmp_path, "others").tls("destination")
    with pytest.raises(VerbFailed, match="safely"):
        rig.peer(tls=replace(others, ca=ours.path)).parts()
    assert rig.files.reads == []


def test_expired_reader_gets_nothing(rig: Rig, ours: Authority) -> None:
    with pytest.raises(VerbFailed, match="safely"):
        rig.peer(tls=ours.tls("destination", valid=-DAY)).parts()
    assert rig.files.reads == []


@pytest.mark.parametrize("wrong", ["authority", "address", "expired"])
def test_source_that_is_not_proved_is_not_read_from(tmp_path: Path, ours: Authority, wrong: str) -> None:
    tls = {"authority": lambda: replace(Authority(tmp_path, "others").tls("source"), ca=ours.path),
           "address": lambda: ours.tls("source", "127.0.0.2"),
           "expired": lambda: ours.tls("source", valid=-DAY)}[wrong]()
    for rig in serving(tmp_path, tls):
        with pytest.raises(VerbFailed) as failed:
            rig.peer(tls=ours.tls("destination")).parts()
        assert "TLS" in failed.value.details and "ertificate" in failed.value.details
        assert rig.files.reads == []


def test_new_certificates_count_at_once(rig: Rig, tmp_path: Path) -> None:
    anew = Authority(tmp_path, "ours")
    anew.tls("source")
    assert whole(rig.peer(tls=anew.tls("destination")), "disk", len(CONTENT)) == CONTENT


def test_files_that_went_away_close_the_service_rather_than_open_it(rig: Rig, ours: Authority, tmp_path: Path) -> None:
    mine = ours.tls("destination")
    Path(tmp_path, "ours-source-key.pem").unlink()
    with pytest.raises(errors.Unavailable):
        rig.peer(tls=mine).parts()
    with pytest.raises((VerbFailed, errors.Unavailable)):
        rig.peer().parts()
    with pytest.raises(VerbFailed, match="cannot prove itself"):
        rig.peer(tls=replace(mine, key=str(tmp_path / "missing"))).parts()


def test_configuration_names_all_files_or_none(ours: Authority, tmp_path: Path) -> None:
    mine = ours.tls("source")
    assert opened("", "", "") is None
    assert opened(mine.cert, mine.key, mine.ca) == mine
    for cert, key, ca in ((mine.cert, "", ""), (mine.cert, mine.key, ""), ("", mine.key, mine.ca), ("", "", mine.ca)):
        with pytest.raises(ValueError, match="set all or none"):
            opened(cert, key, ca)
    for cert, key, ca in ((mine.key, mine.key, mine.ca), (mine.cert, ours.tls("another").key, mine.ca),
                          (mine.cert, mine.key, str(tmp_path / "missing"))):
        with pytest.raises(ValueError, match="give PEM files"):
            opened(cert, key, ca)
