# SPDX-License-Identifier: Apache-2.0
"""Documents of the network service: versions, extensions, availability zones.

Only extensions that exist here are listed.
"""

import falcon

from deploy.one_machine.services.network.faults import fault
from deploy.one_machine.services.web import answer

#: Alias -> (name, description).
EXTENSIONS = {
    "agent": ("agent", "The hosts' parts, as agents."),
    "allowed-address-pairs": ("Allowed Address Pairs", "More addresses that a port may use."),
    "availability_zone": ("Availability Zone", "One zone, nova."),
    "binding": ("Port Binding", "The host of a port."),
    "binding-extended": ("Port Bindings Extended", "More hosts of a port, one of them active."),
    "dns-integration": ("DNS Integration", "Host names of ports, domains of networks."),
    "ext-gw-mode": (
        "Neutron L3 Configurable external gateway mode",
        "Gateways with and without SNAT.",
    ),
    "external-net": ("Neutron external network", "Networks that floating addresses come from."),
    "extraroute": ("Neutron Extra Route", "Static routes of routers."),
    "filter-validation": ("Filter parameters validation", "Unknown filters are refused."),
    "fip-port-details": (
        "Floating IP Port Details Extension",
        "The port that an address floats to.",
    ),
    "ip-substring-filtering": (
        "IP address substring filtering",
        "Ports by a part of their address.",
    ),
    "net-mtu": ("Network MTU", "The MTU of networks."),
    "net-mtu-writable": ("Network MTU (writable)", "The MTU of networks can be set."),
    "network-ip-availability": ("Network IP Availability", "How many addresses are left."),
    "network_availability_zone": ("Network Availability Zone", "One zone, nova."),
    "pagination": ("Pagination support", "limit, marker and page_reverse."),
    "port-security": ("Port Security", "Ports without protection against forged addresses."),
    "project-id": ("project_id field enabled", "project_id beside tenant_id."),
    "provider": ("Provider Network", "The vxlan segment of a network."),
    "quota_details": ("Quota details management support", "How much of a quota is used."),
    "quotas": ("Quota management support", "Limits of projects."),
    "router": ("Neutron L3 Router", "Routers and floating addresses."),
    "router_availability_zone": ("Router Availability Zone", "One zone, nova."),
    "security-group": ("security-group", "Groups of rules that filter a port's packets."),
    "sorting": ("Sorting support", "sort_key and sort_dir."),
    "standard-attr-description": ("standard-attr-description", "Descriptions of everything."),
    "standard-attr-revisions": (
        "Resource revision numbers",
        "revision_number rises with every change.",
    ),
    "standard-attr-timestamp": ("Resource timestamps", "created_at and updated_at."),
    "tag-ports-during-bulk-creation": (
        "Tag Ports During Bulk Creation",
        "Tags in the body of a new port.",
    ),
}
UPDATED = "2026-11-01T00:00:00-00:00"


class NetworkVersions:
    """GET /, open to every client."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        links = [{"rel": "self", "href": f"{req.prefix}/v2.0/"}]
        answer(resp, {"versions": [{"id": "v2.0", "status": "CURRENT", "links": links}]})


class NetworkExtensions:
    """GET /v2.0/extensions and GET /v2.0/extensions/{alias}."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"extensions": [_extension(alias) for alias in EXTENSIONS]})

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, alias: str) -> None:
        if alias not in EXTENSIONS:
            raise fault("ExtensionNotFound", id=alias)
        answer(resp, {"extension": _extension(alias)})


class AvailabilityZones:
    """GET /v2.0/availability_zones: one zone, for networks and routers."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(
            resp,
            {
                "availability_zones": [
                    {"name": "nova", "resource": resource, "state": "available"}
                    for resource in ("network", "router")
                ]
            },
        )


def _extension(alias: str) -> dict[str, object]:
    name, description = EXTENSIONS[alias]
    return {
        "alias": alias,
        "name": name,
        "description": description,
        "updated": UPDATED,
        "links": [],
    }
