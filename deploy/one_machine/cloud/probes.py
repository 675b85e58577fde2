# SPDX-License-Identifier: Apache-2.0
"""Checks of this machine's ports and URLs, for free ports and for services that answer."""

from __future__ import annotations

import errno
import socket
import ssl
import urllib.error
import urllib.request


def is_taken(port: int, address: str) -> bool:
    """Return True if listening on this TCP port of an IPv4 address would be refused as in use.

    An IPv4 address that does not belong to this machine is not taken.

    Raises:
        OSError: The address is an IPv6 address, or the port is refused for another reason, for
            example for lack of rights.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as refusal:
            if refusal.errno == errno.EADDRNOTAVAIL:
                return False
            if refusal.errno == errno.EADDRINUSE:
                return True
            raise
        return False


def answers(port: int, address: str = "127.0.0.1") -> bool:
    """Return True if a program accepts TCP connections on this port of the address within 1 s."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0


def http_answers(url: str, ca_file: str | None = None) -> bool:
    """Return True if a service answers at the URL within 5 s with a status below 500.

    The environment's proxy is not used.

    Args:
        url: The URL to request.
        ca_file: The certificate of the authority that signed the service's certificate. Without
            this, every https URL counts as silent.
    """
    # A default context would load all authorities of this machine for each request.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file:
        context.load_verify_locations(ca_file)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        opener.open(url, timeout=5).close()
    except urllib.error.HTTPError as answer:
        return answer.code < 500
    except OSError:
        return False
    return True
