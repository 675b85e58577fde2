# SPDX-License-Identifier: Apache-2.0
"""The names that guests have in their networks: the port's dns_name, or one made of the address.

The API shows them (dns_assignment) and dnsmasq on the guest's host answers to them; both take them
from here, so that what is shown is what resolves. Pure.
"""

DOMAIN = "openstacklocal"


def host_name(dns_name: str, address: object) -> str:
    """The name of an address: ``dns_name``, or host-10-0-0-5 where there is none."""
    return dns_name or f"host-{str(address).replace('.', '-').replace(':', '-').strip('-')}"


def qualified(name: str) -> str:
    """The whole name, up to the root."""
    return f"{name}.{DOMAIN}."
