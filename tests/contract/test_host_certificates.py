# SPDX-License-Identifier: Apache-2.0
"""A host gets its next certificate for its present one and nothing else, over a real RabbitMQ; what
others could try gets none. The doctor, on the three databases, names what ends soon."""

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
from tests.contract.test_rpc import Told

DAY = datetime.timedelta(days=1)
ADDRESSES = ("192.0.2.7", "node7.example")


class Site:
    """A conductor that signs, and the files of hosts."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.authority = Authority(folder / "tls", "a cloud")
        self.signer = Signer.read(str(self.authority.path), str(self.authority.key_path))
        link = world.control()
        conductor.listen(link, Told(), None, HostCertificates(self.signer))
        assert link.wait_until_ready(5)
        self.refusals = link.refusals
        self._links: dict[str, HostCertificatesClient] = {}

    def client(self, host: str = "h1") -> HostCertificatesClient:
        if host not in self._links:
            self._links[host] = HostCertificatesClient(self.world.host(host))
        return self._links[host]

    def file(self, host: str = "h1", left: datetime.timedelta = 20 * DAY) -> CertificateFile:
        """A host's file, as ``kilonova join`` writes it; ``left``: of its time."""
        made = self.authority.issue(f"{host}-{time.monotonic_ns()}", "192.0.2.1")
        key = serialization.load_pem_private_key(Path(made.key).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        cert = self.signer.sign(key.public_key(), host, ADDRESSES, left)
        path = self.folder / f"{host}.pem"
        path.write_bytes(
            cert.public_bytes(serialization.Encoding.PEM) + Path(made.key).read_bytes()
        )
        return CertificateFile(host, path)


@pytest.fixture
def site(rabbitmq_url: str, tmp_path: Path) -> Iterator[Site]:
    world = World(rabbitmq_url)
    yield Site(world, tmp_path)
    world.close()


def request(key: Any) -> str:
    asked = x509.CertificateSigningRequestBuilder(subject_name("h2")).add_extension(
        x509.SubjectAlternativeName([x509.DNSName("broker.example")]), critical=False
    )
    return asked.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode()


def test_a_host_replaces_what_ends_soon(site: Site) -> None:
    file = site.file()
    before = Certificate.read(str(file.path))
    CertificateKeeper(file, site.client()).look()
    after = Certificate.read(str(file.path))
    after.cert.verify_directly_issued_by(site.signer.cert)
    assert after.cert.public_key() == after.key.public_key() != before.key.public_key()
    assert after.cert.subject == subject_name("h1")
    names = after.cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(one.value) for one in names] == list(ADDRESSES)
    assert OF_HOSTS.total_seconds() - 60 < ends_at(str(file.path)) - time.time()
    assert file.path.stat().st_mode & 0o777 == 0o600
    text = file.path.read_text()
    CertificateKeeper(file, site.client()).look()
    assert file.path.read_text() == text, "what lasts is left alone"


def test_a_request_brings_a_key_and_nothing_else(site: Site) -> None:
    present, key = Certificate.read(str(site.file().path)), ec.generate_private_key(ec.SECP256R1())
    asked = request(key)
    came = site.client().renew(pem(present.cert), asked, present.proof("h1", asked))
    cert = x509.load_pem_x509_certificate(came.encode())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert cert.subject == subject_name("h1")
    assert [str(one.value) for one in names] == list(ADDRESSES)


def of_another_host(site: Site, own: Certificate) -> Certificate:
    """h1 shows h2's, whose key it has."""
    return Certificate.read(str(site.file("h2").path))


def seen_on_a_wire(site: Site, own: Certificate) -> Certificate:
    """The certificate is right, its key is not there: who stole the key file has so much."""
    return replace(own, key=ec.generate_private_key(ec.SECP256R1()))


def over(site: Site, own: Certificate) -> Certificate:
    return Certificate.read(str(site.file(left=-DAY).path))


def of_another_authority(site: Site, own: Certificate) -> Certificate:
    other = Authority(site.folder / "theirs", "a cloud")
    signer = Signer.read(str(other.path), str(other.key_path))
    return replace(own, cert=signer.sign(own.key.public_key(), "h1", ADDRESSES))


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (of_another_host, "does not name host h1"),
        (seen_on_a_wire, "present certificate's key"),
        (over, "is over"),
        (of_another_authority, "not of this cloud's authority"),
    ],
)
def test_others_get_none(site: Site, shown: Any, why: str) -> None:
    present = shown(site, Certificate.read(str(site.file().path)))
    asked = request(ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(errors.BadRequest, match=why):
        site.client().renew(pem(present.cert), asked, present.proof("h1", asked))


def test_a_proof_is_for_one_host_and_one_request(site: Site) -> None:
    present = Certificate.read(str(site.file().path))
    mine, theirs = (request(ec.generate_private_key(ec.SECP256R1())) for _ in range(2))
    for proof in (present.proof("h1", mine), present.proof("h2", theirs), "", "zz"):
        with pytest.raises(errors.BadRequest, match="No certificate is signed"):
            site.client().renew(pem(present.cert), theirs, proof)


def test_a_host_that_was_removed_is_not_heard(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.rpc.host_credentials.ANSWER_SECONDS", 0.5)
    file, client = site.file(), site.client()
    text = file.path.read_text()
    del site.world.generations["h1"]
    CertificateKeeper(file, client).look()
    assert file.path.read_text() == text and site.refusals.counted["h1"] == 1


def test_a_token_of_one_who_joins_gets_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.rpc.host_credentials.ANSWER_SECONDS", 0.5)
    key = derive(SECRETS[Purpose.COMMAND], "h1", 1, Purpose.JOIN)
    token = JoinToken("h1", 1, key.secret.hex(), "")
    link = site.world.host("h1", keys=token.keys, purpose=Purpose.JOIN)
    present, asked = (
        Certificate.read(str(site.file().path)),
        request(ec.generate_private_key(ec.SECP256R1())),
    )
    with pytest.raises(errors.NoAnswer):
        HostCertificatesClient(link).renew(pem(present.cert), asked, present.proof("h1", asked))


def test_what_cannot_be_renewed_says_what_to_do(
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
    said = [one for one in caplog.messages if "is not renewed" in one]
    assert ["another file" in said[0], "state_dir" in said[1], "authority itself" in said[2]] == [
        True,
        True,
        True,
    ]
    assert all("docs/encryption.md" in one for one in said)


def test_doctor_names_hosts_whose_certificate_ends(store: Store) -> None:
    for host, left in (("h1", 400), ("h2", 10), ("h3", None)):
        ends = {} if left is None else {"certificate_ends": int(time.time()) + left * 24 * 3600}
        made = HostInventory("QEMU", 7002000, host, 4, 8192, 9, facts=ends)
        store.write(lambda tx, host=host, made=made: hosts.register(tx, host, "boot", made))
    found = [one for one in store.snapshot(doctor.check) if one.invariant == "certificate-lasts"]
    assert [one.subject for one in found] == ["h2"]
    assert SOON_SECONDS > 10 * 24 * 3600 and "journalctl" in found[0].text
