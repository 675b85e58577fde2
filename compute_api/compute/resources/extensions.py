# SPDX-License-Identifier: Apache-2.0
"""The list of API extensions, which old clients use to detect features of API v2.1.

The list is frozen. Extensions whose operations were removed from the API stay in the list.
Extensions whose operations this cloud does not have are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

from common.domain import errors
from common.domain.json_types import JsonObject
from compute_api.compute.request.request import Request

_SERVER = "/servers/{server_id}"
#: Extensions whose operations all have paths that begin with the alias.
_PATHS = """
    os-agents os-aggregates os-availability-zone os-cells os-certificates os-cloudpipe os-console-auth-tokens
    os-fixed-ips os-floating-ip-dns os-floating-ip-pools os-floating-ips os-floating-ips-bulk os-fping os-hosts
    os-hypervisors os-instance_usage_audit_log os-keypairs os-migrations os-networks os-quota-class-sets os-quota-sets
    os-security-group-default-rules os-security-groups os-server-external-events os-server-groups os-services
    os-simple-tenant-usage os-tenant-networks
"""
#: Extensions with a single operation or action of a server. The remaining extensions only add
#: fields to requests and responses.
OPERATIONS = {
    "NMN": "addFixedIp",
    "os-admin-actions": "os-resetState",
    "os-admin-password": "changePassword",
    "os-assisted-volume-snapshots": "POST /os-assisted-volume-snapshots",
    "os-attach-interfaces": f"POST {_SERVER}/os-interface",
    "os-baremetal-nodes": "GET /os-baremetal-nodes",
    "os-cell-capacities": "GET /os-cells/capacities",
    "os-cloudpipe-update": "PUT /os-cloudpipe/{id}",
    "os-console-output": "os-getConsoleOutput",
    "os-consoles": f"GET {_SERVER}/consoles",
    "os-create-backup": "createBackup",
    "os-deferred-delete": "restore",
    "os-evacuate": "evacuate",
    "os-flavor-access": "GET /flavors/{flavor_id}/os-flavor-access",
    "os-flavor-extra-specs": "GET /flavors/{flavor_id}/os-extra_specs",
    "os-flavor-manage": "POST /flavors",
    "os-instance-actions": f"GET {_SERVER}/os-instance-actions",
    "os-lock-server": "lock",
    "os-migrate-server": "migrate",
    "os-networks-associate": "POST /os-networks/{network_id}/action",
    "os-pause-server": "pause",
    "os-rescue": "rescue",
    "os-server-diagnostics": f"GET {_SERVER}/diagnostics",
    "os-server-password": f"GET {_SERVER}/os-server-password",
    "os-server-start-stop": "os-start",
    "os-shelve": "shelve",
    "os-suspend-server": "suspend",
    "os-virtual-interfaces": f"GET {_SERVER}/os-virtual-interfaces",
    "os-volume-attachment-update": f"PUT {_SERVER}/os-volume_attachments/{{volume_id}}",
    "os-volumes": "GET /os-volumes",
}

_ALIASES_AND_NAMES = """
    NMN Multinic, OS-DCF DiskConfig, OS-EXT-AZ ExtendedAvailabilityZone, OS-EXT-IMG-SIZE ImageSize,
    OS-EXT-IPS ExtendedIps, OS-EXT-IPS-MAC ExtendedIpsMac, OS-EXT-SRV-ATTR ExtendedServerAttributes,
    OS-EXT-STS ExtendedStatus, OS-EXT-VIF-NET ExtendedVIFNet, OS-FLV-DISABLED FlavorDisabled,
    OS-FLV-EXT-DATA FlavorExtraData, OS-SCH-HNT SchedulerHints, OS-SRV-USG ServerUsage, os-access-ips AccessIPs,
    os-admin-actions AdminActions, os-admin-password AdminPassword, os-agents Agents, os-aggregates Aggregates,
    os-assisted-volume-snapshots AssistedVolumeSnapshots, os-attach-interfaces AttachInterfaces,
    os-availability-zone AvailabilityZone, os-baremetal-ext-status BareMetalExtStatus,
    os-baremetal-nodes BareMetalNodes, os-block-device-mapping BlockDeviceMapping,
    os-block-device-mapping-v2-boot BlockDeviceMappingV2Boot, os-cell-capacities CellCapacities, os-cells Cells,
    os-certificates Certificates, os-cloudpipe Cloudpipe, os-cloudpipe-update CloudpipeUpdate,
    os-config-drive ConfigDrive, os-console-auth-tokens ConsoleAuthTokens, os-console-output ConsoleOutput,
    os-consoles Consoles, os-create-backup CreateBackup, os-create-server-ext Createserverext,
    os-deferred-delete DeferredDelete, os-evacuate Evacuate,
    os-extended-evacuate-find-host ExtendedEvacuateFindHost, os-extended-floating-ips ExtendedFloatingIps,
    os-extended-hypervisors ExtendedHypervisors, os-extended-networks ExtendedNetworks,
    os-extended-quotas ExtendedQuotas, os-extended-rescue-with-image ExtendedRescueWithImage,
    os-extended-services ExtendedServices, os-extended-services-delete ExtendedServicesDelete,
    os-extended-status ExtendedStatus, os-extended-volumes ExtendedVolumes, os-fixed-ips FixedIPs,
    os-flavor-access FlavorAccess, os-flavor-extra-specs FlavorExtraSpecs, os-flavor-manage FlavorManage,
    os-flavor-rxtx FlavorRxtx, os-flavor-swap FlavorSwap, os-floating-ip-dns FloatingIpDns,
    os-floating-ip-pools FloatingIpPools, os-floating-ips FloatingIps, os-floating-ips-bulk FloatingIpsBulk,
    os-fping Fping, os-hide-server-addresses HideServerAddresses, os-hosts Hosts,
    os-hypervisor-status HypervisorStatus, os-hypervisors Hypervisors, os-instance-actions InstanceActions,
    os-instance_usage_audit_log OSInstanceUsageAuditLog, os-keypairs Keypairs, os-lock-server LockServer,
    os-migrate-server MigrateServer, os-migrations Migrations, os-multiple-create MultipleCreate,
    os-networks Networks, os-networks-associate NetworkAssociationSupport, os-pause-server PauseServer,
    os-personality Personality, os-preserve-ephemeral-rebuild PreserveEphemeralOnRebuild,
    os-quota-class-sets QuotaClasses, os-quota-sets Quotas, os-rescue Rescue,
    os-security-group-default-rules SecurityGroupDefaultRules, os-security-groups SecurityGroups,
    os-server-diagnostics ServerDiagnostics, os-server-external-events ServerExternalEvents,
    os-server-group-quotas ServerGroupQuotas, os-server-groups ServerGroups,
    os-server-list-multi-status ServerListMultiStatus, os-server-password ServerPassword,
    os-server-sort-keys ServerSortKeys, os-server-start-stop ServerStartStop, os-services Services,
    os-shelve Shelve, os-simple-tenant-usage SimpleTenantUsage, os-suspend-server SuspendServer,
    os-tenant-networks OSTenantNetworks, os-used-limits UsedLimits, os-used-limits-for-admin UsedLimitsForAdmin,
    os-user-data UserData, os-user-quotas UserQuotas, os-virtual-interfaces VirtualInterfaces,
    os-volume-attachment-update VolumeAttachmentUpdate, os-volumes Volumes
"""
_NAMES = dict(pair.split() for pair in _ALIASES_AND_NAMES.split(","))


def _build_extension(alias: str, name: str) -> JsonObject:
    return {
        "alias": alias,
        "name": name,
        "description": f"{name}.",
        "links": [],
        "namespace": "http://docs.openstack.org/compute/ext/fake_xml",
        "updated": "2014-12-03T00:00:00Z",
    }


def announced(operations: Collection[str]) -> dict[str, str]:
    """Return alias -> name of the extensions that a cloud with these operations announces.

    An extension in ``_PATHS`` needs an operation below its path, and an extension in ``OPERATIONS``
    needs that operation. Other extensions are always announced.

    Args:
        operations: Methods with paths, for example "GET /servers", and keys of actions.
    """
    paths = {operation.partition("/")[2].partition("/")[0] for operation in operations}
    path_aliases = _PATHS.split()
    return {
        alias: name
        for alias, name in _NAMES.items()
        if (alias not in path_aliases or alias in paths)
        and (alias not in OPERATIONS or OPERATIONS[alias] in operations)
    }


class Extensions:
    """Handlers of /extensions.

    Args:
        operations: Returns the operations of this cloud. The first request calls this, because the
            table of routes is not complete earlier.
    """

    def __init__(self, operations: Callable[[], Collection[str]]) -> None:
        self._operations = operations

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return announced(self._operations())

    def index(self, request: Request) -> JsonObject:
        """Return the extensions that this cloud announces, for GET /extensions."""
        return {
            "extensions": [_build_extension(alias, name) for alias, name in self._names.items()]
        }

    def show(self, request: Request, alias: str) -> JsonObject:
        """Return one extension for GET /extensions/{alias}.

        Raises:
            NotFound: The cloud does not announce the extension.
        """
        if alias not in self._names:
            raise errors.NotFound("The resource could not be found.")
        return {"extension": _build_extension(alias, self._names[alias])}
