# SPDX-License-Identifier: Apache-2.0
"""Whether a connection is encrypted, and the files that prove its ends: section [tls], read by
whoever connects or listens.

With [tls] ca_file every connection between processes uses TLS: the other side's chain ends at that
authority, and the name or address that was dialled stands in its certificate. Without it
connections are plain text, which is refused where an address is another machine's, unless [tls]
allow_plain_text says so. Contexts are made for each connection, so that new certificates count at
once. Must stay true: whether TLS is used is decided by the configuration alone, never by what the
other side offers.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from oslo_config import cfg

from common.domain.errors import ConfigError

OLDEST = ssl.TLSVersion.TLSv1_2  #: of servers that are not ours; our own speak 1.3


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: this process's certificate and its key (both or none), and the authority
    of all others."""

    cert: str
    key: str
    ca: str

    def for_server(self, *, proved: bool = True) -> ssl.SSLContext:
        """``proved``: clients have to show a certificate of the authority. Raises OSError
        (ssl.SSLError is one) or ValueError when the files cannot be used."""
        context = self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED if proved else ssl.CERT_NONE
        return context

    def for_client(self, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """Verifies chain and name. Raises as ``for_server`` does."""
        context = self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        context.minimum_version = oldest
        return context

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.ca)
        if self.cert:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        return context


def opened(
    cert: str, key: str, ca: str, options: str = "[tls] cert_file {}, key_file {}, ca_file {}"
) -> Tls:
    """These files, once they were read. Raises ConfigError, with what to do, when they cannot be
    used."""
    made = Tls(cert, key, ca)
    try:
        made.for_client()
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{options.format(cert or '(none)', key or '(none)', ca)}: {problem}; give PEM files that "
            "this process can read, the key without a password"
        ) from problem
    return made


def of(conf: cfg.ConfigOpts) -> Tls | None:
    """The files of [tls]; None: TLS is not used. Raises ConfigError."""
    cert, ca = conf.tls.cert_file, conf.tls.ca_file
    key = conf.tls.key_file or cert
    if key and not cert:
        raise ConfigError("[tls] cert_file and key_file belong together: set cert_file too")
    if cert and not ca:
        raise ConfigError(
            "[tls] cert_file is set and ca_file is not: set it to the authority that signs the "
            "certificates of the other processes, of broker and database"
        )
    return opened(cert, key, ca) if ca else None


def protecting(
    conf: cfg.ConfigOpts,
    option: str,
    addresses: Iterable[str | None],
    *,
    listens: bool = False,
    off: str = "",
) -> Tls | None:
    """What protects the connections to, or where it ``listens`` at, the addresses that an option
    names; None: they are plain text. ``off`` is the option's value that turned TLS off for them, if
    one did.

    Raises:
        ConfigError: it would be plain text to another machine; or the files cannot be used.
    """
    found = of(conf)
    if found is not None and not off:
        if listens and not found.cert:
            raise ConfigError(
                f"{option} is served over TLS, as [tls] ca_file is set: set [tls] cert_file and key_file "
                "too"
            )
        return found
    elsewhere = next((address for address in addresses if not is_loopback(address)), None)
    if elsewhere is not None and not conf.tls.allow_plain_text:
        why = off or "[tls] ca_file is not set"
        raise ConfigError(
            f"{option}: {elsewhere} is no loopback address and {why}, so that passwords and commands "
            "would travel as plain text. Set [tls] ca_file, cert_file and key_file; or [tls] "
            "allow_plain_text = true where nobody else reaches that network"
        )
    return None


def of_url(conf: cfg.ConfigOpts, option: str, url: str) -> bool | str:
    """What the certificate at a URL is verified with: the file of our authority, or True: those
    that the system knows.

    Raises:
        ConfigError: it is plain HTTP to another machine.
    """
    where = urlsplit(url)
    if where.scheme == "https":
        found = of(conf)
        return found.ca if found else True
    protecting(conf, option, [where.hostname], off=f"{option} does not begin with https://")
    return True


def of_neighbour(
    conf: cfg.ConfigOpts, option: str, url: str, remedy: str = "give an https:// URL"
) -> str:
    """The URL of a service that is not ours, to which passwords or tokens are sent; its certificate
    is verified with the authorities that the libraries know.

    Raises:
        ConfigError: it is plain HTTP to another machine.
    """
    where = urlsplit(url)
    if (
        where.scheme != "https"
        and not is_loopback(where.hostname)
        and not (conf.identity.allow_plain_text or conf.tls.allow_plain_text)
    ):
        address = f"{where.scheme}://{where.netloc.rpartition('@')[2]}"
        raise ConfigError(
            f"{option}: {address} is no https:// and no loopback address, so that passwords and tokens "
            f"would travel as plain text: {remedy}, or set [identity] allow_plain_text = true where "
            "nobody else reaches that network"
        )
    return url


def refusal_of_neighbour(conf: cfg.ConfigOpts, option: str, url: str) -> str:
    """Why nothing is sent to this URL; empty: it may be."""
    try:
        of_neighbour(conf, option, url)
    except ConfigError as problem:
        return str(problem)
    return ""


def of_neighbours(conf: cfg.ConfigOpts) -> None:
    """Judge the URLs of all neighbours that are configured; of others the catalogue says where they
    are. Raises ConfigError as ``of_neighbour`` does."""
    of_neighbour(conf, "[identity] auth_url", conf.identity.auth_url)
    for section in ("image", "network", "share", "volume"):
        if conf[section].endpoint:
            of_neighbour(conf, f"[{section}] endpoint", conf[section].endpoint)


def is_loopback(address: str | None) -> bool:
    """Does what is sent there stay on this machine? Names are not looked up: only localhost is."""
    if not address or address == "localhost" or address.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _no_password() -> str:
    raise ValueError("the key has a password")
