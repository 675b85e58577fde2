# SPDX-License-Identifier: Apache-2.0
"""Extensions: the frozen list of what API v2.1 was once made of, by which old clients recognise it.

Extensions have long been parts of the API like any other, and some have since been removed from it; the list stays as
it was, and microversions say what there is.
"""
from __future__ import annotations

from typing import Any

from common import errors
from compute_api.request import Request

_NAMES = dict(pair.split() for pair in ["\n    NMN Multinic", " OS-DCF DiskConfig", " OS-EXT-AZ ExtendedAvailabilityZone", " OS-EXT-IMG-SIZE ImageSize", "\n    OS-EXT-IPS ExtendedIps", " OS-EXT-IPS-MAC ExtendedIpsMac", " OS-EXT-SRV-ATTR ExtendedServerAttributes", "\n    OS-EXT-STS ExtendedStatus", " OS-EXT-VIF-NET ExtendedVIFNet", " OS-FLV-DISABLED FlavorDisabled", "\n    OS-FLV-EXT-DATA FlavorExtraData", " OS-SCH-HNT SchedulerHints", " OS-SRV-USG ServerUsage", " os-access-ips AccessIPs", "\n    os-admin-actions AdminActions", " os-admin-password AdminPassword", " os-agents Agents", " os-aggregates Aggregates", "\n    os-assisted-volume-snapshots AssistedVolumeSnapshots", " os-attach-interfaces AttachInterfaces", "\n    os-availability-zone AvailabilityZone", " os-baremetal-ext-status BareMetalExtStatus", "\n    os-baremetal-nodes BareMetalNodes", " os-block-device-mapping BlockDeviceMapping", "\n    os-block-device-mapping-v2-boot BlockDeviceMappingV2Boot", " os-cell-capacities CellCapacities", " os-cells Cells", "\n    os-certificates Certificates", " os-cloudpipe Cloudpipe", " os-cloudpipe-update CloudpipeUpdate", "\n    os-config-drive ConfigDrive", " os-console-auth-tokens ConsoleAuthTokens", " os-console-output ConsoleOutput", "\n    os-consoles Consoles", " os-create-backup CreateBackup", " os-create-server-ext Createserverext", "\n    os-deferred-delete DeferredDelete", " os-evacuate Evacuate", "\n    os-extended-evacuate-find-host ExtendedEvacuateFindHost", " os-extended-floating-ips ExtendedFloatingIps", "\n    os-extended-hypervisors ExtendedHypervisors", " os-extended-networks ExtendedNetworks", "\n    os-extended-quotas ExtendedQuotas", " os-extended-rescue-with-image ExtendedRescueWithImage", "\n    os-extended-services ExtendedServices", " os-extended-services-delete ExtendedServicesDelete", "\n    os-extended-status ExtendedStatus", " os-extended-volumes ExtendedVolumes", " os-fixed-ips FixedIPs", "\n    os-flavor-access FlavorAccess", " os-flavor-extra-specs FlavorExtraSpecs", " os-flavor-manage FlavorManage", "\n    os-flavor-rxtx FlavorRxtx", " os-flavor-swap FlavorSwap", " os-floating-ip-dns FloatingIpDns", "\n    os-floating-ip-pools FloatingIpPools", " os-floating-ips FloatingIps", " os-floating-ips-bulk FloatingIpsBulk", "\n    os-fping Fping", " os-hide-server-addresses HideServerAddresses", " os-hosts Hosts", "\n    os-hypervisor-status HypervisorStatus", " os-hypervisors Hypervisors", " os-instance-actions InstanceActions", "\n    os-instance_usage_audit_log OSInstanceUsageAuditLog", " os-keypairs Keypairs", " os-lock-server LockServer", "\n    os-migrate-server MigrateServer", " os-migrations Migrations", " os-multiple-create MultipleCreate", "\n    os-networks Networks", " os-networks-associate NetworkAssociationSupport", " os-pause-server PauseServer", "\n    os-personality Personality", " os-preserve-ephemeral-rebuild PreserveEphemeralOnRebuild", "\n    os-quota-class-sets QuotaClasses", " os-quota-sets Quotas", " os-rescue Rescue", "\n    os-security-group-default-rules SecurityGroupDefaultRules", " os-security-groups SecurityGroups", "\n    os-server-diagnostics ServerDiagnostics", " os-server-external-events ServerExternalEvents", "\n    os-server-group-quotas ServerGroupQuotas", " os-server-groups ServerGroups", "\n    os-server-list-multi-status ServerListMultiStatus", " os-server-password ServerPassword", "\n    os-server-sort-keys ServerSortKeys", " os-server-start-stop ServerStartStop", " os-services Services", "\n    os-shelve Shelve", " os-simple-tenant-usage SimpleTenantUsage", " os-suspend-server SuspendServer", "\n    os-tenant-networks OSTenantNetworks", " os-used-limits UsedLimits", " os-used-limits-for-admin UsedLimitsForAdmin", "\n    os-user-data UserData", " os-user-quotas UserQuotas", " os-virtual-interfaces VirtualInterfaces", "\n    os-volume-attachment-update VolumeAttachmentUpdate", " os-volumes Volumes\n"])


def _extension(alias: str, name: str) -> dict[str, Any]:
    return {"alias": alias, "name": name, "description": f"{name}.", "links": [],
            "namespace": "http://docs.openstack.org/compute/ext/fake_xml", "updated": "2014-12-03T00:00:00Z"}


def index(request: Request) -> dict[str, Any]:
    """GET /extensions"""
    return {"extensions": [_extension(alias, name) for alias, name in _NAMES.items()]}


def show(request: Request, alias: str) -> dict[str, Any]:
    """GET /extensions/{alias}"""
    if alias not in _NAMES:
        raise errors.NotFound("The resource could not be found.")
    return {"extension": _extension(alias, _NAMES[alias])}
