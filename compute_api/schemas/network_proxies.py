# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of the proxies to the network service, which were never strict: unknown keys are passed over."""
from __future__ import annotations

from compute_api.schemas.common import ANY, COUNT, IPV4, IPV6, UUID, query, record, repeated, wrapped
from compute_api.validation import Document, Versioned

_TEXT: Document = {"type": "string", "maxLength": 255}
_ADDRESS: Document = {"anyOf": [IPV4, IPV6]}


def _open(name: str, properties: Document, required: tuple[str, ...]) -> Versioned:
    """A body whose content may hold more than what is known."""
    return Versioned({"type": "object", "required": [name], "properties": {name: {
        "type": "object", "properties": properties, "required": list(required)}}})


GROUPS = Versioned(query({"limit": repeated(COUNT), "offset": repeated(COUNT), "all_tenants": repeated()}))
GROUP = _open("security_group", {"name": _TEXT, "description": _TEXT}, ("name", "description"))
RULE = _open("security_group_rule", {
    "parent_group_id": UUID, "group_id": {"anyOf": [{"type": "null"}, UUID]}, "ip_protocol": ANY, "from_port": ANY,
    "to_port": ANY, "cidr": ANY}, ("parent_group_id",))
FLOATING_IP = Versioned({"type": ["object", "null"], "properties": {"pool": {"type": ["string", "null"]}}})

#: Actions on servers.
ACTIONS: dict[str, Versioned] = {
    "addFixedIp": Versioned(wrapped("addFixedIp", record(
        {"networkId": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 36}, {"type": "number"}]}},
        ("networkId",)))),
    "removeFixedIp": Versioned(wrapped("removeFixedIp", record({"address": _ADDRESS}, ("address",)))),
    "addFloatingIp": Versioned(wrapped("addFloatingIp", record(
        {"address": _ADDRESS, "fixed_address": _ADDRESS}, ("address",)))),
    "removeFloatingIp": Versioned(wrapped("removeFloatingIp", record({"address": _ADDRESS}, ("address",)))),
}
