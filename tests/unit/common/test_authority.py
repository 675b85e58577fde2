# SPDX-License-Identifier: Apache-2.0
"""Signing of certificates for hosts that join, with the real ``Signer`` and ``Authority``."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from common.domain.errors import ConfigError
from common.security.certificates import Signer, subject_name
from deploy.one_machine.cloud.authority import Authority

OWN = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls", "a cloud")


def signing_request(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey = OWN) -> str:
    """Return a signing request with a subject and a SAN that the host must not get."""
    builder = x509.CertificateSigningRequestBuilder(subject_name("broker")).add_extension(
        x509.SubjectAlternativeName([x509.DNSName("broker.example")]), critical=False
    )
    return (
        builder.sign(key, hashes.SHA256() if key is OWN else None)
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )


def test_signer_answer_ignores_subject_and_names_of_request(authority: Authority) -> None:
    signer = Signer.read(str(authority.path), str(authority.key_path))
    cert = x509.load_pem_x509_certificate(
        signer.answer(signing_request(), "h1", "192.0.2.7").encode()
    )
    cert.verify_directly_issued_by(signer.cert)
    assert cert.public_key() == OWN.public_key()
    assert cert.subject == subject_name("h1")
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["192.0.2.7"]
    assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert cert.not_valid_after_utc <= signer.cert.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    assert cert.not_valid_before_utc < now < cert.not_valid_after_utc


def test_signer_answer_refuses_damaged_or_unsupported_request(authority: Authority) -> None:
    signer = Signer.read(str(authority.path), str(authority.key_path))
    der = bytearray(x509.load_pem_x509_csr(signing_request().encode()).public_bytes(_DER))
    # The request is changed after the signature.
    der[der.index(b"broker")] ^= 1
    changed = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM).decode()
    for text in (
        "",
        "x",
        signing_request()[:200],
        changed,
        signing_request(ed25519.Ed25519PrivateKey.generate()),
    ):
        with pytest.raises(ValueError):
            signer.answer(text, "h1", "192.0.2.7")


_DER = serialization.Encoding.DER


def test_signer_read_refuses_key_of_another_certificate_or_missing_key(
    authority: Authority, tmp_path: Path
) -> None:
    other, host = Authority(tmp_path / "other"), authority.issue("h1", "192.0.2.7")
    for key in (str(other.key_path), host.key):
        with pytest.raises(ConfigError, match="ca_key_file .* is not the key"):
            Signer.read(str(authority.path), key)
    with pytest.raises(ConfigError, match="ca_key_file .*missing"):
        Signer.read(str(authority.path), str(tmp_path / "missing"))
    both = tmp_path / "both.pem"
    both.write_text(other.path.read_text() + authority.path.read_text())
    assert Signer.read(str(both), str(authority.key_path)).cert.subject == subject_name("a cloud")
