# SPDX-License-Identifier: Apache-2.0
"""The type of the option pci_alias, in Nova's format: names of PCI devices for flavors.

Used only by ``common.service.config``.
"""

from __future__ import annotations

import json
import re

from oslo_config import types


class PciAliases(types.ConfigType):
    """A JSON list of {"name", "vendor_id", "product_id"}, parsed to name -> kinds of devices.

    A kind is (vendor, product) in four hexadecimal digits. A name that occurs several times stands
    for any of its kinds.
    """

    def __call__(self, value: object) -> dict[str, list[tuple[str, str]]]:
        kinds_by_name: dict[str, list[tuple[str, str]]] = {}
        try:
            rows = json.loads(str(value))
            for row in rows:
                name, kind = (
                    row.pop("name"),
                    (row.pop("vendor_id").lower(), row.pop("product_id").lower()),
                )
                if (
                    row
                    or not re.fullmatch("[A-Za-z0-9._-]{1,255}", name)
                    or not all(re.fullmatch("[0-9a-f]{4}", part) for part in kind)
                ):
                    raise ValueError
                kinds_by_name.setdefault(name, []).append(kind)
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            raise ValueError(
                'must be a JSON list of {"name": "gpu", "vendor_id": "10de", "product_id": "1db4"}, with '
                "vendor_id and product_id of four hexadecimal digits"
            ) from problem
        return kinds_by_name

    def __repr__(self) -> str:
        return "PciAliases"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PciAliases)

    def _formatter(self, value: object) -> str:
        return json.dumps(value)
