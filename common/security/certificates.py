# SPDX-License-Identifier: Apache-2.0
"""Certificates of hosts and processes: read, sign, renew and verify.

A host makes its keys itself (``NewKey``), and proves its present certificate when it requests the
next one (``Certificate.proof``). Conductors sign with the key in [tls] ca_key_file (``Signer``).
deploy/one_machine/cloud/authority.py makes an authority for one machine and for labs. This module
writes no files.

Invariant: subject and addresses come from the signer. Those in a request are ignored.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.domain.errors import ConfigError

DAY = datetime.timedelta(days=1)
YEARS = 3650 * DAY
#: Agents renew their certificates (compute_agent.certificate).
OF_HOSTS = 365 * DAY
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey
_REACHED = (x509.IPAddress, x509.DNSName)
DAY_SECONDS = 24 * 3600
#: Seconds before the end at which alerts begin and a host renews.
SOON_SECONDS = 30 * DAY_SECONDS
ALGORITHM = hashes.SHA256()
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True)
class Certificate:
    """The content of [tls] cert_file: a certificate and its key."""

    cert: x509.Certificate
    key: PrivateKey

    @classmethod
    def read(cls, path: str) -> Certificate:
        """Read the certificate and the key from one PEM file.

        Raises:
            OSError: The file cannot be read.
            ValueError: Certificate or key is missing or unusable.
            TypeError: The key has a password.
        """
        text = Path(path).read_bytes()
        key = serialization.load_pem_private_key(text, None)
        if not isinstance(key, PrivateKey):
            raise ValueError("the key is neither EC nor RSA")
        return cls(x509.load_pem_x509_certificate(text), key)

    def proof(self, host: str, request: str) -> str:
        """Sign a request (PEM) of a host for its next certificate with this certificate's key.

        Returns:
            The signature, in hexadecimal digits.
        """
        signed = _signed_text(host, request)
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(signed, padding.PKCS1v15(), ALGORITHM).hex()
        return self.key.sign(signed, ec.ECDSA(ALGORITHM)).hex()


def check_proof(cert: x509.Certificate, host: str, request: str, proof: str) -> None:
    """Verify that ``Certificate.proof`` made the proof with this certificate's key.

    Raises:
        ValueError: The proof is malformed, of another key, or for another host or request. Or the
            certificate's key is neither EC nor RSA.
    """
    public, signed = cert.public_key(), _signed_text(host, request)
    try:
        if isinstance(public, rsa.RSAPublicKey):
            public.verify(bytes.fromhex(proof), signed, padding.PKCS1v15(), ALGORITHM)
        elif isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(bytes.fromhex(proof), signed, ec.ECDSA(ALGORITHM))
        else:
            raise ValueError("the certificate's key is neither EC nor RSA")
    except InvalidSignature as problem:
        raise ValueError("the proof was not made with the present certificate's key") from problem


def _signed_text(host: str, request: str) -> bytes:
    return json.dumps(["next certificate", host, request]).encode()


def ends_at(path: str) -> int:
    """Return the end of validity of the first certificate in a PEM file, in seconds since 1970.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has no certificate.
    """
    cert = x509.load_pem_x509_certificate(Path(path).read_bytes())
    return int(cert.not_valid_after_utc.timestamp())


class NewKey:
    """A key that this machine makes for a certificate that it requests."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    def request(self, host: str) -> str:
        """Return the request (PEM) for a certificate of this host with this key."""
        request = x509.CertificateSigningRequestBuilder(subject_name(host)).sign(
            self._key, ALGORITHM
        )
        return request.public_bytes(serialization.Encoding.PEM).decode()

    def file(self, certificate: str) -> str:
        """Return the content for [tls] cert_file: the certificate (PEM) and this key.

        Raises:
            ValueError: The certificate is malformed, or for another key.
        """
        cert = x509.load_pem_x509_certificate(certificate.encode())
        if cert.public_key() != self._key.public_key():
            raise ValueError("the certificate is not for the key of the request")
        return certificate + private_pem(self._key)


def private_pem(key: PrivateKey) -> str:
    """Return a private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


@dataclass(frozen=True)
class Signer:
    """The authority's certificate and its key, with which conductors sign hosts' certificates."""

    cert: x509.Certificate
    key: PrivateKey

    @classmethod
    def read(cls, ca_file: str, key_file: str) -> Signer:
        """Read the authority's certificate and key.

        Raises:
            ConfigError: The files cannot be used, or the key is of no authority in ``ca_file``.
        """
        try:
            key = serialization.load_pem_private_key(Path(key_file).read_bytes(), None)
            authorities = x509.load_pem_x509_certificates(Path(ca_file).read_bytes())
        except (OSError, ValueError, TypeError) as problem:
            raise ConfigError(
                f"[tls] ca_key_file {key_file}, ca_file {ca_file}: {problem}; give PEM files that this "
                "process can read, the key without a password"
            ) from problem
        if isinstance(key, PrivateKey):
            for cert in authorities:
                if cert.public_key() == key.public_key():
                    return cls(cert, key)
        raise ConfigError(
            f"[tls] ca_key_file {key_file} is not the key (EC or RSA) of an authority in ca_file {ca_file}"
        )

    def sign(
        self,
        public: PublicKey,
        name: str,
        reached_at: tuple[str, ...],
        valid: datetime.timedelta = YEARS,
    ) -> x509.Certificate:
        """Return a signed certificate for a server or client.

        Args:
            public: The key of the certificate.
            name: The subject.
            reached_at: The names and addresses at which the server is reached.
            valid: Validity from now. The certificate ends no later than the authority's own.
        """
        now = datetime.datetime.now(datetime.UTC)
        return (
            builder(self.cert.subject, subject_name(name), public, now)
            .not_valid_after(min(now + valid, self.cert.not_valid_after_utc))
            .add_extension(
                x509.SubjectAlternativeName([general_name(address) for address in reached_at]),
                critical=False,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(signs_others=False), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, ALGORITHM)
        )

    def answer(self, request: str, name: str, address: str) -> str:
        """Return a host's first certificate (PEM), for the key in a request (PEM).

        Args:
            request: The request. Its subject is ignored.
            name: Name of the host.
            address: Address of the host.

        Raises:
            ValueError: The request is malformed or not signed with its own key, or its key is
                neither EC nor RSA.
        """
        public = _read_requested_key(request)
        return pem(self.sign(public, name, (address,), OF_HOSTS))

    def renew(self, host: str, present: str, request: str, proof: str) -> str:
        """Return the next certificate (PEM) of a host, for the addresses of the present one.

        Args:
            host: Name of the host.
            present: The present certificate (PEM).
            request: The request (PEM) with the new key.
            proof: The result of ``Certificate.proof``.

        Raises:
            ValueError: The present certificate is of another host or authority, or not valid now,
                the proof is not of its key, or an argument is malformed.
            x509.ExtensionNotFound: The present certificate has no addresses.
        """
        cert = x509.load_pem_x509_certificate(present.encode())
        try:
            cert.verify_directly_issued_by(self.cert)
        except (InvalidSignature, TypeError) as problem:
            raise ValueError(
                "the present certificate is not of this cloud's authority"
            ) from problem
        if cert.subject != subject_name(host):
            raise ValueError(f"the present certificate does not name host {host}")
        now = datetime.datetime.now(datetime.UTC)
        if not cert.not_valid_before_utc <= now <= cert.not_valid_after_utc:
            raise ValueError("the present certificate is not valid now: it has ended or not begun")
        check_proof(cert, host, request, proof)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = tuple(str(name.value) for name in names if isinstance(name, _REACHED))
        return pem(self.sign(_read_requested_key(request), host, addresses, OF_HOSTS))


def new_authority(name: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return the certificate of a new authority with this subject and key."""
    now, subject = datetime.datetime.now(datetime.UTC), subject_name(name)
    return (
        builder(subject, subject, key.public_key(), now)
        .not_valid_after(now + YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs_others=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, ALGORITHM)
    )


def _read_requested_key(request: str) -> PublicKey:
    """Return the key of a request.

    Raises:
        ValueError: The request is malformed or not signed with that key, or the key is neither EC
            nor RSA.
    """
    parsed = x509.load_pem_x509_csr(request.encode())
    public = parsed.public_key()
    if not parsed.is_signature_valid or not isinstance(public, PublicKey):
        raise ValueError("the request is not signed with its own key, EC or RSA")
    return public


def builder(
    issuer: x509.Name, subject: x509.Name, public: PublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    """Return the builder of a certificate that is valid from two days before ``now``.

    Why: clocks differ.

    The caller adds the end of validity and the extensions, and signs.
    """
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
    )


def general_name(address: str) -> x509.GeneralName:
    """Return an IP address or a DNS name as a subject alternative name of a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def subject_name(name: str) -> x509.Name:
    """Return a certificate's subject with this common name, cut to the permitted 64 characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def usage(*, signs_others: bool) -> x509.KeyUsage:
    """Return the key usage of an authority (``signs_others``) or of a certificate it signs."""
    return x509.KeyUsage(
        digital_signature=not signs_others,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_others,
        crl_sign=signs_others,
        encipher_only=False,
        decipher_only=False,
    )


def pem(cert: x509.Certificate) -> str:
    """Return a certificate as PEM."""
    return cert.public_bytes(serialization.Encoding.PEM).decode()
