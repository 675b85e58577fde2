# SPDX-License-Identifier: Apache-2.0
"""TLS of connections, from section [tls]. Used by every process that connects or listens.

With [tls] ca_file every connection between processes uses TLS: the peer's chain must end at this
authority, and its certificate must contain the dialled name or address. Without ca_file connections
are plain text. Plain text to another machine is refused unless [tls] allow_plain_text is set.
Contexts are created for each connection, so that new certificates take effect at once.

Invariant: only the configuration decides whether TLS is used, never the peer's offer.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from oslo_config import cfg

from common.domain.errors import ConfigError

#: The oldest version of external servers. Kilonova's own use 1.3.
OLDEST = ssl.TLSVersion.TLSv1_2


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: this process's certificate and key (both or none), and the authority."""

    cert: str
    key: str
    ca: str

    def for_server(self, *, proved: bool = True) -> ssl.SSLContext:
        """Return a new context of a server with these files, for TLS 1.3 only.

        Args:
            proved: True: clients must present a certificate of the authority. False: clients need
                no certificate.

        Raises:
            OSError: A file cannot be used (ssl.SSLError is an OSError).
            ValueError: The key has a password.
        """
        context = self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED if proved else ssl.CERT_NONE
        return context

    def for_client(self, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        """Return a new context of a client, which verifies the server's chain and name.

        The client presents this process's certificate if there is a certificate.

        Args:
            oldest: The oldest accepted version of TLS.

        Raises:
            OSError, ValueError: As ``for_server``.
        """
        context = self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        context.minimum_version = oldest
        return context

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.ca)
        if self.cert:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        return context


def load(
    cert: str, key: str, ca: str, options: str = "[tls] cert_file {}, key_file {}, ca_file {}"
) -> Tls:
    """Return the files with these paths, after a check that this process can use them.

    Args:
        cert: Path of the certificate, or empty.
        key: Path of the key, or empty.
        ca: Path of the authority's certificate.
        options: The options that name the files, for the error, with a {} for each path.

    Raises:
        ConfigError: The files cannot be used. The text has the remedy.
    """
    files = Tls(cert, key, ca)
    try:
        files.for_client()
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{options.format(cert or '(none)', key or '(none)', ca)}: {problem}; give PEM files that "
            "this process can read, the key without a password"
        ) from problem
    return files


def of(conf: cfg.ConfigOpts) -> Tls | None:
    """Return the files of [tls], or None without ca_file.

    Without key_file, cert_file contains the key too.

    Raises:
        ConfigError: cert_file is set without ca_file, or key_file without cert_file. Or the files
            cannot be used.
    """
    cert, ca = conf.tls.cert_file, conf.tls.ca_file
    key = conf.tls.key_file or cert
    if key and not cert:
        raise ConfigError("[tls] cert_file and key_file belong together: set cert_file too")
    if cert and not ca:
        raise ConfigError(
            "[tls] cert_file is set and ca_file is not: set ca_file to the authority that signs the "
            "certificates of the other processes, of broker and database"
        )
    return load(cert, key, ca) if ca else None


def protecting(
    conf: cfg.ConfigOpts,
    option: str,
    addresses: Iterable[str | None],
    *,
    listens: bool = False,
    off: str = "",
) -> Tls | None:
    """Return the TLS files for connections to the addresses of an option, or None for plain text.

    Args:
        conf: The configuration.
        option: Name of the option, for errors.
        addresses: The addresses in the option. None is a local address.
        listens: True: this process listens at the addresses.
        off: The reason why this option turns TLS off in spite of [tls], for the error. Empty if the
            option does not.

    Raises:
        ConfigError: The connection would be plain text to another machine, without [tls]
            allow_plain_text. Or the files or options of [tls] cannot be used (``of``), or a
            listener has no certificate.
    """
    files = of(conf)
    if files is not None and not off:
        if listens and not files.cert:
            raise ConfigError(
                f"[tls] ca_file is set, so {option} is served over TLS: set [tls] cert_file and key_file too"
            )
        return files
    remote = next((address for address in addresses if not is_loopback(address)), None)
    if remote is not None and not conf.tls.allow_plain_text:
        why = off or "[tls] ca_file is not set"
        raise ConfigError(
            f"{option}: {remote} is no loopback address and {why}, so that passwords and commands "
            "would travel as plain text. Set [tls] ca_file, cert_file and key_file; or [tls] "
            "allow_plain_text = true if only machines of this cloud reach that network"
        )
    return None


def of_url(conf: cfg.ConfigOpts, option: str, url: str) -> bool | str:
    """Return how to verify the certificate at a URL of this cloud.

    Returns:
        The path of [tls] ca_file. Without ca_file True, for the authorities of the system. True
        also for a permitted http:// URL.

    Raises:
        ConfigError: The URL is plain HTTP to another machine, without [tls] allow_plain_text. Or
            the files or options of [tls] cannot be used (``of``).
    """
    parts = urlsplit(url)
    if parts.scheme == "https":
        files = of(conf)
        return files.ca if files else True
    protecting(conf, option, [parts.hostname], off=f"{option} does not begin with https://")
    return True


def check_external_url(
    conf: cfg.ConfigOpts, option: str, url: str, remedy: str = "give an https:// URL"
) -> str:
    """Return the URL unchanged, after a check that passwords and tokens may be sent to it.

    Permitted are https URLs, loopback addresses, and URLs without a host. With allow_plain_text in
    [identity] or [tls], all URLs are permitted.

    Args:
        conf: The configuration.
        option: The place of the URL, for the error.
        url: The URL of an external service.
        remedy: The instruction in the error.

    Raises:
        ConfigError: The URL is not permitted.
    """
    parts = urlsplit(url)
    if (
        parts.scheme != "https"
        and not is_loopback(parts.hostname)
        and not (conf.identity.allow_plain_text or conf.tls.allow_plain_text)
    ):
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ConfigError(
            f"{option}: {address} is no https:// and no loopback address, so that passwords and tokens "
            f"would travel as plain text: {remedy}, or set [identity] allow_plain_text = true if "
            "only machines of this cloud reach that network"
        )
    return url


def refusal_of_external_url(conf: cfg.ConfigOpts, option: str, url: str) -> str:
    """Return the reason why this URL is not safe for passwords and tokens, or an empty text."""
    try:
        check_external_url(conf, option, url)
    except ConfigError as problem:
        return str(problem)
    return ""


def check_external_urls(conf: cfg.ConfigOpts) -> None:
    """Check [identity] auth_url and the endpoints in [image], [network], [share] and [volume].

    An endpoint that is not set comes from the catalogue, and is not checked here.

    Raises:
        ConfigError: As ``check_external_url``.
    """
    check_external_url(conf, "[identity] auth_url", conf.identity.auth_url)
    for section in ("image", "network", "share", "volume"):
        if conf[section].endpoint:
            check_external_url(conf, f"[{section}] endpoint", conf[section].endpoint)


def is_loopback(address: str | None) -> bool:
    """Return True if traffic to this address stays on the machine.

    True for no address, a path of a Unix socket and the name localhost. Other names are False.
    """
    if not address or address == "localhost" or address.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _no_password() -> str:
    raise ValueError("the key has a password")
