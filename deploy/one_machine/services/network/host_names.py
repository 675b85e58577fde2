# SPDX-License-Identifier: Apache-2.0
"""Host names of guests in their networks: the port's dns_name, or a name made from the address.

The API shows them (dns_assignment), and dnsmasq on the guest's host resolves them. Both use this
module, so they agree. The functions are pure.
"""

DOMAIN = "openstacklocal"


def host_name(dns_name: str, address: object) -> str:
    """Return ``dns_name``, or if empty a name of the address, such as host-10-0-0-5."""
    return dns_name or f"host-{str(address).replace('.', '-').replace(':', '-').strip('-')}"


def qualify(name: str) -> str:
    """Return the fully qualified form of a host name, with ``DOMAIN`` and a dot at the end."""
    return f"{name}.{DOMAIN}."
