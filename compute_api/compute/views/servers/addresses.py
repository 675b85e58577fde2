# SPDX-License-Identifier: Apache-2.0
"""A server's addresses as answers, from the ``interfaces`` column's text: by network, in the
interfaces' order.

Within a network the fixed addresses come first, then the floating ones.
"""

from __future__ import annotations

import functools

import orjson

from common.domain.json_types import JsonObject


def grouped(text: str | None) -> dict[str, list[JsonObject]]:
    """Label of a network -> {version, addr} of each address."""
    return {
        label: [{"version": one["version"], "addr": one["addr"]} for one in found]
        for label, found in _known(text).items()
    }


@functools.lru_cache(maxsize=4096)
def of_server(text: str | None) -> orjson.Fragment:
    """The same with each address's type and MAC, as servers show them."""
    return orjson.Fragment(
        orjson.dumps(
            {
                label: [
                    {
                        "version": one["version"],
                        "addr": one["addr"],
                        "OS-EXT-IPS:type": one["type"],
                        "OS-EXT-IPS-MAC:mac_addr": one["mac"],
                    }
                    for one in found
                ]
                for label, found in _known(text).items()
            }
        )
    )


def _known(text: str | None) -> dict[str, list[JsonObject]]:
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
                {"version": 6 if ":" in one else 4, "addr": one, "type": "floating", "mac": mac}
                for one in address.get("floating", ())
            )
    return {label: found + floating[label] for label, found in fixed.items()}
