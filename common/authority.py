# SPDX-License-Identifier: Apache-2.0
"""What a certificate authority signs: certificates of processes, and those of hosts that join or
ask for their next one.

deploy/authority.py makes an authority of its own with this; conductors have the key of one where
[tls] ca_key_file is set. Must stay true: whose certificate it is, and where that one is reached,
says who signs, never what was handed in.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.certificates import check_proof
from common.errors import ConfigError

DAY = datetime.timedelta(days=1)
YEARS = 3650 * DAY
OF_HOSTS = 365 * DAY  #: agents ask for the next one by themselves (compute_agent.certificate)
SigningKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
#: Of certificates: those that are asked for have one of these kinds.
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey
_REACHED = (x509.IPAddress, x509.DNSName)


@dataclass(frozen=True)
class Signer:
    """The authority's certificate and its key."""

    cert: x509.Certificate
    key: SigningKey

    @classmethod
    def opened(cls, ca_file: str, key_file: str) -> Signer:
        """Raises ConfigError: the files cannot be used, or do not belong together."""
        try:
            key = serialization.load_pem_private_key(Path(key_file).read_bytes(), None)
            known = x509.load_pem_x509_certificates(Path(ca_file).read_bytes())
        except (OSError, ValueError, TypeError) as problem:
            raise ConfigError(
                f"[tls] ca_key_file {key_file}, ca_file {ca_file}: {problem}; give PEM files that this "
                "process can read, the key without a password"
            ) from problem
        if isinstance(key, SigningKey):
            for cert in known:
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
        """For who is reached at these names and addresses; clients too show it. Never longer than
        the authority's own."""
        now = datetime.datetime.now(datetime.UTC)
        return (
            builder(self.cert.subject, named(name), public, now)
            .not_valid_after(min(now + valid, self.cert.not_valid_after_utc))
            .add_extension(
                x509.SubjectAlternativeName([reached(one) for one in reached_at]), critical=False
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
            .sign(self.key, hashes.SHA256())
        )

    def answer(self, request: str, name: str, address: str) -> str:
        """The certificate (PEM) for the key in a request (PEM), of which nothing else counts.

        Raises:
            ValueError: it is no request, or its sender has not its key.
        """
        public = _asked_for(request)
        return pem(self.sign(public, name, (address,), OF_HOSTS))

    def renew(self, host: str, present: str, request: str, proof: str) -> str:
        """The next certificate (PEM) of a host, for the key in a request (PEM) and for what its
        present one (PEM) is for. ``proof``: ``Certificate.proof``.

        Raises:
            ValueError: the present one is not this host's, not of this authority or over, or who
            asks has not its key.
        """
        cert = x509.load_pem_x509_certificate(present.encode())
        try:
            cert.verify_directly_issued_by(self.cert)
        except (InvalidSignature, TypeError) as problem:
            raise ValueError(
                "the present certificate is not of this cloud's authority"
            ) from problem
        if cert.subject != named(host):
            raise ValueError(f"the present certificate does not name host {host}")
        now = datetime.datetime.now(datetime.UTC)
        if not cert.not_valid_before_utc <= now <= cert.not_valid_after_utc:
            raise ValueError("the present certificate is over")
        check_proof(cert, host, request, proof)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        where = tuple(str(one.value) for one in names if isinstance(one, _REACHED))
        return pem(self.sign(_asked_for(request), host, where, OF_HOSTS))


def _asked_for(request: str) -> PublicKey:
    """Raises ValueError: it is no request, or its sender has not its key."""
    asked = x509.load_pem_x509_csr(request.encode())
    public = asked.public_key()
    if not asked.is_signature_valid or not isinstance(public, PublicKey):
        raise ValueError("the request is not signed with its own key, EC or RSA")
    return public


def builder(
    issuer: x509.Name, subject: x509.Name, public: PublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    """What all certificates have, from two days ago on: clocks differ."""
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
    )


def reached(where: str) -> x509.GeneralName:
    """An address, or a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(where))
    except ValueError:
        return x509.DNSName(where)


def named(name: str) -> x509.Name:
    """Common names have 64 characters at most."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def usage(*, signs_others: bool) -> x509.KeyUsage:
    """Of an authority, or of who it signs for."""
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
    """As files have it."""
    return cert.public_bytes(serialization.Encoding.PEM).decode()
