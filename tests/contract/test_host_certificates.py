# SPDX-License-Identifier: Apache-2.0
"""Renewal of host certificates over a real RabbitMQ, and the doctor's finding on the databases.

A host gets the next certificate with the present one. Every other request is refused.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from common.domain import errors
from common.domain.models import HostInventory
from common.rpc import conductor
from common.rpc.host_credentials import HostCertificatesClient
from common.security.certificates import (
    OF_HOSTS,
    SOON_SECONDS,
    Certificate,
    Signer,
    ends_at,
    subject_name,
)
from common.security.host_joins import JoinToken
from common.security.host_keys import Purpose, derive
from common.store.engine import Store
from common.store.hosts import hosts
from compute_agent.certificate import CertificateFile, CertificateKeeper
from conductor.hosts.host_credentials import HostCertificates
from deploy.one_machine.cloud.authority import Authority
from deploy.operator import doctor
from tests.contract.test_host_link import SECRETS, World
from tests.contract.test_rpc import CallRecorder
from tests.log_lines import rendered_lines

DAY = datetime.timedelta(days=1)
ADDRESSES = ("192.0.2.7", "node7.example")


class Site:
    """A conductor that signs, and the certificate files of hosts."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.authority = Authority(folder / "tls", "a cloud")
        self.signer = Signer.read(str(self.authority.path), str(self.authority.key_path))
        link = world.control()
        conductor.listen(link, CallRecorder(), None, HostCertificates(self.signer))
        assert link.wait_until_ready(5)
        self.refusals = link.refusals
        self._links: dict[str, HostCertificatesClient] = {}

    def client(self, host: str = "h1") -> HostCertificatesClient:
        if host not in self._links:
            self._links[host] = HostCertificatesClient(self.world.host(host))
        return self._links[host]

    def file(self, host: str = "h1", left: datetime.timedelta = 20 * DAY) -> CertificateFile:
        """Write a host's certificate file as ``kilonova join`` does, valid for ``left``."""
        issued = self.authority.issue(f"{host}-{time.monotonic_ns()}", "192.0.2.1")
        key = serialization.load_pem_private_key(Path(issued.key).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        cert = self.signer.sign(key.public_key(), host, ADDRESSES, left)
        path = self.folder / f"{host}.pem"
        path.write_bytes(
            cert.public_bytes(serialization.Encoding.PEM) + Path(issued.key).read_bytes()
        )
        return CertificateFile(host, path)


@pytest.fixture
def site(rabbitmq_url: str, tmp_path: Path) -> Iterator[Site]:
    world = World(rabbitmq_url)
    yield Site(world, tmp_path)
    world.close()


def request(key: Any) -> str:
    builder = x509.CertificateSigningRequestBuilder(subject_name("h2")).add_extension(
        x509.SubjectAlternativeName([x509.DNSName("broker.example")]), critical=False
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode()


def test_certificate_keeper_renews_expiring_certificate(site: Site) -> None:
    file = site.file()
    before = Certificate.read(str(file.path))
    CertificateKeeper(file, site.client()).look()
    after = Certificate.read(str(file.path))
    after.cert.verify_directly_issued_by(site.signer.cert)
    assert after.cert.public_key() == after.key.public_key() != before.key.public_key()
    assert after.cert.subject == subject_name("h1")
    names = after.cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == list(ADDRESSES)
    assert OF_HOSTS.total_seconds() - 60 < ends_at(str(file.path)) - time.time()
    assert file.path.stat().st_mode & 0o777 == 0o600
    text = file.path.read_text()
    CertificateKeeper(file, site.client()).look()
    assert file.path.read_text() == text, "what lasts is left alone"


def test_renew_certificate_takes_only_public_key_from_csr(site: Site) -> None:
    present, key = Certificate.read(str(site.file().path)), ec.generate_private_key(ec.SECP256R1())
    csr = request(key)
    renewed = site.client().renew(pem(present.cert), csr, present.proof("h1", csr))
    cert = x509.load_pem_x509_certificate(renewed.encode())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert cert.subject == subject_name("h1")
    assert [str(name.value) for name in names] == list(ADDRESSES)


def certificate_of_other_host(site: Site, own: Certificate) -> Certificate:
    """h1 presents the certificate of h2, including the key."""
    return Certificate.read(str(site.file("h2").path))


def certificate_without_key(site: Site, own: Certificate) -> Certificate:
    """Return the host's own certificate with another private key."""
    return replace(own, key=ec.generate_private_key(ec.SECP256R1()))


def expired_certificate(site: Site, own: Certificate) -> Certificate:
    return Certificate.read(str(site.file(left=-DAY).path))


def certificate_of_other_authority(site: Site, own: Certificate) -> Certificate:
    other = Authority(site.folder / "theirs", "a cloud")
    signer = Signer.read(str(other.path), str(other.key_path))
    return replace(own, cert=signer.sign(own.key.public_key(), "h1", ADDRESSES))


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (certificate_of_other_host, "does not name host h1"),
        (certificate_without_key, "present certificate's key"),
        (expired_certificate, "is not valid now"),
        (certificate_of_other_authority, "not of this cloud's authority"),
    ],
)
def test_renew_with_foreign_expired_or_keyless_certificate_is_bad_request(
    site: Site, shown: Any, why: str
) -> None:
    present = shown(site, Certificate.read(str(site.file().path)))
    csr = request(ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(errors.BadRequest, match=why):
        site.client().renew(pem(present.cert), csr, present.proof("h1", csr))


def test_renew_with_proof_of_other_host_or_csr_raises_bad_request(site: Site) -> None:
    present = Certificate.read(str(site.file().path))
    mine, theirs = (request(ec.generate_private_key(ec.SECP256R1())) for _ in range(2))
    for proof in (present.proof("h1", mine), present.proof("h2", theirs), "", "zz"):
        with pytest.raises(errors.BadRequest, match="No certificate is signed"):
            site.client().renew(pem(present.cert), theirs, proof)


def test_renew_certificate_of_removed_host_is_refused_without_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.rpc.host_credentials.ANSWER_SECONDS", 0.5)
    file, client = site.file(), site.client()
    text = file.path.read_text()
    del site.world.generations["h1"]
    CertificateKeeper(file, client).look()
    assert file.path.read_text() == text and site.refusals.counted["h1"] == 1


def test_renew_certificate_with_join_token_is_not_answered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.rpc.host_credentials.ANSWER_SECONDS", 0.5)
    key = derive(SECRETS[Purpose.COMMAND], "h1", 1, Purpose.JOIN)
    token = JoinToken("h1", 1, key.secret.hex(), "")
    link = site.world.host("h1", keys=token.keys, purpose=Purpose.JOIN)
    present, csr = (
        Certificate.read(str(site.file().path)),
        request(ec.generate_private_key(ec.SECP256R1())),
    )
    with pytest.raises(errors.NoAnswer):
        HostCertificatesClient(link).renew(pem(present.cert), csr, present.proof("h1", csr))


def test_certificate_keeper_logs_remedy_when_renewal_is_impossible(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.file()
    CertificateKeeper(replace(file, has_key=False), site.client()).look()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    CertificateKeeper(file, site.client()).look()
    monkeypatch.undo()
    monkeypatch.setattr("common.security.certificates.OF_HOSTS", DAY)
    CertificateKeeper(file, site.client()).look()
    with pytest.raises(errors.Conflict, match="ca_key_file"):
        HostCertificates(None).renew("h1", "", "", "")
    warnings = [line for line in rendered_lines(caplog) if "is not renewed" in line]
    assert [
        "another file" in warnings[0],
        "state_dir" in warnings[1],
        "authority itself" in warnings[2],
    ] == [
        True,
        True,
        True,
    ]
    assert all("docs/encryption.md" in message for message in warnings)


def test_doctor_reports_host_with_expiring_certificate(store: Store) -> None:
    for host, left in (("h1", 400), ("h2", 10), ("h3", None)):
        ends = {} if left is None else {"certificate_ends": int(time.time()) + left * 24 * 3600}
        inventory = HostInventory("QEMU", 7002000, host, 4, 8192, 9, facts=ends)
        store.write(
            lambda tx, host=host, inventory=inventory: hosts.register(tx, host, "boot", inventory)
        )
    findings = [
        finding
        for finding in store.snapshot(doctor.check)
        if finding.invariant == "certificate-lasts"
    ]
    assert [finding.subject for finding in findings] == ["h2"]
    assert SOON_SECONDS > 10 * 24 * 3600 and "journalctl" in findings[0].text
