# SPDX-License-Identifier: Apache-2.0
"""A server's addresses in responses, by network, from the text of the column ``interfaces``.

Networks are in the order of the interfaces. In a network, fixed addresses precede floating
addresses.
"""

from __future__ import annotations

import functools

import orjson

from common.domain.json_types import JsonObject


def grouped(text: str | None) -> dict[str, list[JsonObject]]:
    """Return the addresses by network: label -> objects with version and addr.

    Args:
        text: The column ``interfaces``, or None for no addresses.
    """
    return {
        label: [
            {"version": address["version"], "addr": address["addr"]}
            for address in network_addresses
        ]
        for label, network_addresses in _list_by_network(text).items()
    }


@functools.lru_cache(maxsize=4096)
def of_server(text: str | None) -> orjson.Fragment:
    """Return the addresses by network with types and MAC addresses, as JSON text for a server.

    Args:
        text: The column ``interfaces``, or None for no addresses.
    """
    return orjson.Fragment(
        orjson.dumps(
            {
                label: [
                    {
                        "version": address["version"],
                        "addr": address["addr"],
                        "OS-EXT-IPS:type": address["type"],
                        "OS-EXT-IPS-MAC:mac_addr": address["mac"],
                    }
                    for address in network_addresses
                ]
                for label, network_addresses in _list_by_network(text).items()
            }
        )
    )


def _list_by_network(text: str | None) -> dict[str, list[JsonObject]]:
    fixed: dict[str, list[JsonObject]] = {}
    floating: dict[str, list[JsonObject]] = {}
    for interface in orjson.loads(text) if text else ():
        label, mac = interface["label"], interface["mac"]
        for address in interface["addresses"]:
            fixed.setdefault(label, []).append(
                {
                    "version": address["version"],
                    "addr": address["address"],
                    "type": "fixed",
                    "mac": mac,
                }
            )
            floating.setdefault(label, []).extend(
                {"version": 6 if ":" in ip else 4, "addr": ip, "type": "floating", "mac": mac}
                for ip in address.get("floating", ())
            )
    return {
        label: network_addresses + floating[label] for label, network_addresses in fixed.items()
    }
