# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of operations without a sufficient schema, by the operations' titles.

A body may be a function of the caller's records. The function gets the ids of the records by the
part of the path before them.
"""

from __future__ import annotations

from typing import Any

from tests import allowed

IMAGE = allowed.IMAGE
_ACT = "POST /servers/{server_id}/action "
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA me"
NEW_PROVIDER = {"name": "other", "uuid": "0f9a2c52-0000-4000-8000-000000000001"}
PASSWORD = "correct horse"

#: Key of an action -> body. tests/allowed.py has most actions, except addresses, consoles and
#: networks.
_ACTIONS: dict[str, Any] = {
    name.partition(" ")[0]: rule.body for name, rule in allowed.ALL.items()
} | {
    "os-getVNCConsole": {"type": "novnc"},
    "os-getSerialConsole": {"type": "serial"},
    "os-getSPICEConsole": {"type": "spice-html5"},
    "injectNetworkInfo": None,
    "os-getConsoleOutput": {},
    "os-migrateLive": {"host": None, "block_migration": "auto"},
    "unshelve": {"availability_zone": None},
}

BODIES: dict[str, Any] = {
    **{_ACT + name: {name: body} for name, body in _ACTIONS.items()},
    _ACT + "addFixedIp": lambda records: {"addFixedIp": {"networkId": records["network"]}},
    _ACT + "addSecurityGroup": lambda records: {
        "addSecurityGroup": {"name": records["os-security-groups"]}
    },
    _ACT + "removeSecurityGroup": lambda records: {
        "removeSecurityGroup": {"name": records["os-security-groups"]}
    },
    _ACT + "addFloatingIp": lambda records: {"addFloatingIp": {"address": records["floating"]}},
    _ACT + "removeFloatingIp": lambda records: {
        "removeFloatingIp": {"address": records["floating"]}
    },
    _ACT + "removeFixedIp": lambda records: {"removeFixedIp": {"address": records["fixed"]}},
    "POST /servers": {
        "server": {"name": "x", "imageRef": IMAGE, "flavorRef": "1", "networks": "none"}
    },
    "PUT /servers/{server_id}": {"server": {"name": "x"}},
    "POST /servers/{server_id}/remote-consoles": {
        "remote_console": {"protocol": "vnc", "type": "novnc"}
    },
    "POST /servers/{server_id}/os-interface": lambda records: {
        "interfaceAttachment": {"net_id": records["network"]}
    },
    "POST /servers/{server_id}/os-volume_attachments": lambda records: {
        "volumeAttachment": {"volumeId": records["os-volume_attachments"]}
    },
    "PUT /servers/{server_id}/os-volume_attachments/{volume_id}": lambda records: {
        "volumeAttachment": {"volumeId": records["os-volume_attachments"]}
    },
    "POST /servers/{server_id}/metadata": {"metadata": {"x": "y"}},
    "PUT /servers/{server_id}/metadata": {"metadata": {"x": "y"}},
    "PUT /servers/{server_id}/metadata/{key}": lambda records: {"meta": {records["metadata"]: "y"}},
    "PUT /servers/{server_id}/tags": {"tags": ["x"]},
    "POST /os-server-external-events": lambda records: {
        "events": [{"name": "network-changed", "server_uuid": records["servers"]}]
    },
    "POST /os-assisted-volume-snapshots": lambda records: {
        "snapshot": {
            "volume_id": records["os-volume_attachments"],
            "create_info": {"snapshot_id": "x", "type": "qcow2", "new_file": "x"},
        }
    },
    "POST /flavors": {"flavor": {"name": "x", "ram": 64, "vcpus": 1, "disk": 1}},
    "PUT /flavors/{flavor_id}": {"flavor": {"description": "x"}},
    "POST /flavors/{flavor_id}/action addTenantAccess": {"addTenantAccess": {"tenant": "x"}},
    "POST /flavors/{flavor_id}/action removeTenantAccess": lambda records: {
        "removeTenantAccess": {"tenant": records["os-quota-sets"]}
    },
    "POST /flavors/{flavor_id}/os-extra_specs": {"extra_specs": {"hw:cpu_policy": "shared"}},
    "PUT /flavors/{flavor_id}/os-extra_specs/{key}": {"hw:cpu_policy": "shared"},
    "POST /os-keypairs": {"keypair": {"name": "x", "type": "ssh", "public_key": PUBLIC_KEY}},
    "PUT /os-quota-sets/{project_id}": {"quota_set": {"cores": 30}},
    "PUT /os-quota-class-sets/{name}": {"quota_class_set": {"cores": 30}},
    "POST /os-server-groups": {"server_group": {"name": "x", "policy": "affinity"}},
    "PUT /os-services/{service_id}": {"status": "enabled"},
    "POST /os-services/{service_id}/actions": {"drain": {}},
    "PUT /os-hosts/{host}": {"status": "enable"},
    "POST /os-aggregates": {"aggregate": {"name": "x"}},
    "PUT /os-aggregates/{aggregate_id}": {"aggregate": {"name": "x"}},
    "POST /os-aggregates/{aggregate_id}/action add_host": {"add_host": {"host": "host1"}},
    "POST /os-aggregates/{aggregate_id}/action remove_host": {"remove_host": {"host": "host2"}},
    "POST /os-aggregates/{aggregate_id}/action set_metadata": {
        "set_metadata": {"metadata": {"x": "y"}}
    },
    "POST /os-aggregates/{aggregate_id}/images": {"cache": [{"id": IMAGE}]},
    "POST /os-volumes": {"volume": {"size": 1}},
    "POST /os-snapshots": {"snapshot": {"volume_id": IMAGE}},
    "POST /os-security-groups": {"security_group": {"name": "x", "description": "x"}},
    "PUT /os-security-groups/{group_id}": {"security_group": {"name": "x", "description": "x"}},
    "POST /os-security-group-rules": lambda records: {
        "security_group_rule": {
            "parent_group_id": records["os-security-groups"],
            "ip_protocol": "tcp",
            "from_port": 1,
            "to_port": 2,
            "cidr": "10.0.0.0/8",
        }
    },
    "POST /os-floating-ips": {"pool": "public-own"},
    "POST /os-baremetal-nodes": {},
    "POST /os-baremetal-nodes/{id}/action": {},
    "POST /images/{image_id}/metadata": {"metadata": {"x": "y"}},
    "PUT /images/{image_id}/metadata": {"metadata": {"x": "y"}},
    "PUT /images/{image_id}/metadata/{key}": lambda records: {"meta": {records["metadata"]: "y"}},
    # placement
    "POST /resource_providers": NEW_PROVIDER,
    "PUT /resource_providers/{provider_uuid}": {"name": "host1"},
    "POST /resource_providers/{provider_uuid}/inventories": {
        "resource_class": "CUSTOM_X",
        "total": 1,
    },
    "PUT /resource_providers/{provider_uuid}/inventories": {
        "resource_provider_generation": 1,
        "inventories": {},
    },
    "PUT /resource_providers/{provider_uuid}/inventories/{resource_class}": {
        "resource_provider_generation": 1,
        "total": 9,
    },
    "PUT /resource_providers/{provider_uuid}/aggregates": {
        "aggregates": [],
        "resource_provider_generation": 1,
    },
    "PUT /resource_providers/{provider_uuid}/traits": {
        "traits": [],
        "resource_provider_generation": 1,
    },
    "POST /resource_classes": {"name": "CUSTOM_X"},
    "PUT /resource_classes/{name}": {"name": "CUSTOM_X"},
    # identity
    "POST /v3/auth/tokens": lambda records: {
        "auth": {
            "identity": {
                "methods": ["password"],
                "password": {"user": {"id": records["users"], "password": PASSWORD}},
            }
        }
    },
    "POST /v3/users": {"user": {"name": "x"}},
    "PATCH /v3/users/{key}": {"user": {"description": "x"}},
    "POST /v3/projects": {"project": {"name": "x"}},
    "PATCH /v3/projects/{key}": {"project": {"description": "x"}},
    "POST /v3/domains": {"domain": {"name": "x"}},
    "PATCH /v3/domains/{key}": {"domain": {"description": "x"}},
    "POST /v3/roles": {"role": {"name": "x"}},
    "PATCH /v3/roles/{key}": {"role": {"description": "x"}},
    "POST /v3/services": {"service": {"type": "x", "name": "x"}},
    "PATCH /v3/services/{key}": {"service": {"description": "x"}},
    "POST /v3/regions": {"region": {"id": "x"}},
    "PATCH /v3/regions/{key}": {"region": {"description": "x"}},
    "POST /v3/endpoints": lambda records: {
        "endpoint": {"service_id": records["services"], "interface": "public", "url": "http://x"}
    },
    "PATCH /v3/endpoints/{key}": {"endpoint": {"url": "http://y"}},
    "POST /v3/limits": lambda records: {
        "limits": [
            {
                "service_id": records["services"],
                "resource_name": "servers",
                "resource_limit": 1,
                "domain_id": "default",
            }
        ]
    },
    "PATCH /v3/limits/{key}": {"limit": {"resource_limit": 2}},
    "POST /v3/registered_limits": lambda records: {
        "registered_limits": [
            {"service_id": records["services"], "resource_name": "x", "default_limit": 1}
        ]
    },
    "PATCH /v3/registered_limits/{key}": {"registered_limit": {"default_limit": 2}},
    # image
    "POST /v2/images": {"name": "x", "disk_format": "raw", "container_format": "bare"},
    "PATCH /v2/images/{key}": [{"op": "replace", "path": "/name", "value": "x"}],
    "PUT /v2/images/{key}/file": b"data",
    # network
    "PUT /v2.0/quotas/{project_id}": {"quota": {"network": 7}},
    "PUT /v2.0/kilonova/hosts/{name}": {"revision": 0, "tunnel_address": "192.0.2.1"},
    "POST /v2.0/networks": {"network": {"name": "x"}},
    "PUT /v2.0/networks/{key}": {"network": {"name": "x"}},
    "POST /v2.0/subnets": lambda records: {
        "subnet": {"network_id": records["networks"], "cidr": "10.9.0.0/24", "ip_version": 4}
    },
    "PUT /v2.0/subnets/{key}": {"subnet": {"name": "x"}},
    "POST /v2.0/ports": lambda records: {"port": {"network_id": records["networks"]}},
    "PUT /v2.0/ports/{key}": {"port": {"name": "x"}},
    "POST /v2.0/ports/{key}/bindings": {"binding": {"host": "host2"}},
    "POST /v2.0/routers": {"router": {"name": "x"}},
    "PUT /v2.0/routers/{key}": {"router": {"name": "x"}},
    "PUT /v2.0/routers/{key}/add_router_interface": lambda records: {"port_id": records["ports"]},
    "PUT /v2.0/routers/{key}/remove_router_interface": lambda records: {
        "subnet_id": records["subnets"]
    },
    "POST /v2.0/security-groups": {"security_group": {"name": "x"}},
    "PUT /v2.0/security-groups/{key}": {"security_group": {"name": "x"}},
    "POST /v2.0/security-group-rules": lambda records: {
        "security_group_rule": {
            "security_group_id": records["security-groups"],
            "direction": "egress",
            "protocol": "udp",
        }
    },
    "PUT /v2.0/security-group-rules/{key}": {"security_group_rule": {}},
    "POST /v2.0/floatingips": lambda records: {
        "floatingip": {"floating_network_id": records["public"]}
    },
    "PUT /v2.0/floatingips/{key}": {"floatingip": {"description": "x"}},
}

QUERIES = {
    "GET /os-simple-tenant-usage": "?start=2026-01-01T00:00:00&end=2026-02-01T00:00:00",
    "GET /os-simple-tenant-usage/{project_id}": "?start=2026-01-01T00:00:00&end=2026-02-01T00:00:00",
    "GET /allocation_candidates": "?resources=VCPU:1",
    "GET /usages": "?project_id=x",
}
