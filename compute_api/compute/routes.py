# SPDX-License-Identifier: Apache-2.0
"""The routes of the API: one row per operation. All other facts of an operation are in its handler.

Rows with the same method and path differ in their versions. A path without a row is 404, a path
with rows for other methods only is 405, and a row outside its versions is 404. The rule in
``policy`` is checked before the handler runs. The target is the server of the route, or the
caller's project if the route is not about a server. Handlers of rows with an empty policy check the
policy themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.domain import states
from compute_api.compute.proxies import floating_ips, images, networks, volumes
from compute_api.compute.proxies import security_groups as security_group_proxy
from compute_api.compute.resources import (
    aggregates,
    availability_zones,
    external_events,
    flavors,
    host_actions,
    hosts,
    hypervisors,
    keypairs,
    migrations,
    quota_sets,
    server_groups,
    services,
    usage,
    usage_audit,
)
from compute_api.compute.resources.extensions import Extensions
from compute_api.compute.schemas import aggregates as aggregate_bodies
from compute_api.compute.schemas import common
from compute_api.compute.schemas import external_events as event_bodies
from compute_api.compute.schemas import flavors as flavor_bodies
from compute_api.compute.schemas import host_actions as host_action_bodies
from compute_api.compute.schemas import hosts as host_bodies
from compute_api.compute.schemas import hypervisors as hypervisor_bodies
from compute_api.compute.schemas import keypairs as keypair_bodies
from compute_api.compute.schemas import migrations as migration_bodies
from compute_api.compute.schemas import quota_sets as quota_bodies
from compute_api.compute.schemas import server_groups as group_bodies
from compute_api.compute.schemas import services as service_bodies
from compute_api.compute.schemas import usage as usage_bodies
from compute_api.compute.schemas.proxies import floating_ips as floating_ip_bodies
from compute_api.compute.schemas.proxies import images as image_bodies
from compute_api.compute.schemas.proxies import security_groups as security_group_bodies
from compute_api.compute.schemas.proxies import volumes as volume_bodies
from compute_api.compute.schemas.servers import actions as server_action_bodies
from compute_api.compute.schemas.servers import assisted_snapshots as assisted_bodies
from compute_api.compute.schemas.servers import consoles as console_bodies
from compute_api.compute.schemas.servers import instance_actions as instance_action_bodies
from compute_api.compute.schemas.servers import interfaces as interface_bodies
from compute_api.compute.schemas.servers import metadata as metadata_bodies
from compute_api.compute.schemas.servers import servers as server_bodies
from compute_api.compute.schemas.servers import shares as share_bodies
from compute_api.compute.schemas.servers import volume_attachments as attachment_bodies
from compute_api.compute.servers import consoles, instance_actions, servers
from compute_api.compute.servers import diagnostics as server_diagnostics
from compute_api.compute.servers import metadata as server_metadata
from compute_api.compute.servers import topology as server_topology
from compute_api.compute.servers.actions import actions as server_actions
from compute_api.compute.servers.create import create as server_create
from compute_api.compute.servers.disks import assisted_snapshots, shares, volume_attachments
from compute_api.compute.servers.networks import addresses, interfaces, security_groups
from compute_api.http.routing import ApiRoute


@dataclass(frozen=True, slots=True)
class Route(ApiRoute):
    """An operation in a range of microversions.

    If the path contains ``{server_id}``, the handler gets the row of that server.
    """

    since: str = "2.1"
    #: True if the server may be deleted.
    deleted: bool = False

    @property
    def about_server(self) -> bool:
        """True if the handler gets a server's row."""
        return "{server_id}" in self.path


_P = "os_compute_api:"
_SERVER, _FLAVOR, _AGGREGATE = (
    "/servers/{server_id}",
    "/flavors/{flavor_id}",
    "/os-aggregates/{aggregate_id}",
)
#: An operation of Kilonova, see resources.host_actions.
_HOST_ACTIONS = "/os-services/{service_id}/actions"
#: Keys of bodies that may be larger than SMALL_BODY_BYTES: user data and files (rebuild),
#: descriptions of flavors with 65,535 letters, maps with 128 items of 255 letters each, and lists
#: of events.
_LARGE_ACTIONS = frozenset({"rebuild", "createImage", "createBackup"})
_METADATA, _FLAVOR_BODY, _SPECS = (
    frozenset({"metadata"}),
    frozenset({"flavor"}),
    frozenset({"extra_specs"}),
)
#: The last version with proxies to other services.
_PROXIED = "2.35"


def operations() -> set[str]:
    """Return all operations of this API, including the removed operations of ``GONE``.

    An operation is a method with a path, for example "GET /servers", or a key of
    ``states.ACTIONS``.
    """
    removed = {f"{method} {path}" for path, methods in GONE.items() for method in methods.split()}
    return (
        {f"{route.method} {route.path}" for route in ROUTES}
        | removed
        | {row.key for row in states.ACTIONS}
    )


_EXTENSIONS = Extensions(operations)

# fmt: off
ROUTES: tuple[Route, ...] = (
    Route("GET", "/extensions", _EXTENSIONS.index, _P + "extensions"),
    Route("GET", "/extensions/{alias}", _EXTENSIONS.show, _P + "extensions"),
    Route("GET", "/limits", quota_sets.limits, _P + "limits", query=quota_bodies.LIMITS),

    # servers
    Route("GET", "/servers", servers.index, _P + "servers:index", query=server_bodies.LIST),
    Route("GET", "/servers/detail", servers.detail, _P + "servers:detail", query=server_bodies.LIST),
    Route("POST", "/servers", server_create.create, _P + "servers:create", success=202, body=server_bodies.CREATE,
          large_keys=frozenset({"server"})),
    Route("GET", _SERVER, servers.show, _P + "servers:show"),
    Route("PUT", _SERVER, servers.update, _P + "servers:update", body=server_bodies.UPDATE),
    Route("DELETE", _SERVER, servers.delete, _P + "servers:delete", success=204),
    Route("POST", _SERVER + "/action", server_actions.act, "", success=202, body=server_action_bodies.BODY,
          large_keys=_LARGE_ACTIONS),
    Route("POST", _SERVER + "/remote-consoles", consoles.create, _P + "os-remote-consoles", "2.6",
          body=console_bodies.CREATE),
    Route("GET", _SERVER + "/diagnostics", server_diagnostics.show, _P + "os-server-diagnostics"),
    Route("GET", _SERVER + "/os-server-password", server_diagnostics.password, _P + "os-server-password:show"),
    Route("DELETE", _SERVER + "/os-server-password", server_diagnostics.clear_password,
          _P + "os-server-password:clear", success=204),
    Route("GET", _SERVER + "/topology", server_topology.show, "compute:server:topology:index", "2.78"),
    Route("GET", _SERVER + "/os-volume_attachments", volume_attachments.index, _P + "os-volumes-attachments:index",
          query=attachment_bodies.LIST),
    Route("GET", _SERVER + "/os-volume_attachments/{volume_id}", volume_attachments.show,
          _P + "os-volumes-attachments:show", query=attachment_bodies.SHOW),
    Route("POST", _SERVER + "/os-volume_attachments", volume_attachments.attach, _P + "os-volumes-attachments:create",
          body=attachment_bodies.CREATE),
    Route("PUT", _SERVER + "/os-volume_attachments/{volume_id}", volume_attachments.update,
          _P + "os-volumes-attachments:update", success=202, body=attachment_bodies.UPDATE),
    Route("DELETE", _SERVER + "/os-volume_attachments/{volume_id}", volume_attachments.detach,
          _P + "os-volumes-attachments:delete", success=202),
    Route("GET", _SERVER + "/ips", addresses.index, _P + "ips:index"),
    Route("GET", _SERVER + "/ips/{network}", addresses.show, _P + "ips:show"),
    Route("GET", _SERVER + "/os-interface", interfaces.index, _P + "os-attach-interfaces:list"),
    Route("POST", _SERVER + "/os-interface", interfaces.attach, _P + "os-attach-interfaces:create",
          body=interface_bodies.CREATE),
    Route("GET", _SERVER + "/os-interface/{port_id}", interfaces.show, _P + "os-attach-interfaces:show"),
    Route("DELETE", _SERVER + "/os-interface/{port_id}", interfaces.detach, _P + "os-attach-interfaces:delete",
          success=202),
    Route("GET", _SERVER + "/shares", shares.index, _P + "os-server-shares:index", "2.97", query=share_bodies.READ),
    Route("POST", _SERVER + "/shares", shares.attach, _P + "os-server-shares:create", "2.97", success=201,
          body=share_bodies.CREATE),
    Route("GET", _SERVER + "/shares/{share_id}", shares.show, _P + "os-server-shares:show", "2.97",
          query=share_bodies.READ),
    Route("DELETE", _SERVER + "/shares/{share_id}", shares.detach, _P + "os-server-shares:delete", "2.97"),
    Route("GET", _SERVER + "/os-security-groups", security_groups.of_server, _P + "os-security-groups:list"),
    Route("GET", _SERVER + "/metadata", server_metadata.index, _P + "server-metadata:index"),
    Route("POST", _SERVER + "/metadata", server_metadata.add, _P + "server-metadata:create", body=metadata_bodies.ALL,
          large_keys=_METADATA),
    Route("PUT", _SERVER + "/metadata", server_metadata.replace, _P + "server-metadata:update_all",
          body=metadata_bodies.ALL, large_keys=_METADATA),
    Route("GET", _SERVER + "/metadata/{key}", server_metadata.show, _P + "server-metadata:show"),
    Route("PUT", _SERVER + "/metadata/{key}", server_metadata.put, _P + "server-metadata:update",
          body=metadata_bodies.ITEM),
    Route("DELETE", _SERVER + "/metadata/{key}", server_metadata.remove, _P + "server-metadata:delete", success=204),
    Route("GET", _SERVER + "/tags", server_metadata.tags, _P + "os-server-tags:index", "2.26"),
    Route("PUT", _SERVER + "/tags", server_metadata.replace_tags, _P + "os-server-tags:update_all", "2.26",
          body=metadata_bodies.TAGS),
    Route("DELETE", _SERVER + "/tags", server_metadata.remove_tags, _P + "os-server-tags:delete_all", "2.26",
          success=204),
    Route("GET", _SERVER + "/tags/{tag}", server_metadata.has_tag, _P + "os-server-tags:show", "2.26", success=204),
    Route("PUT", _SERVER + "/tags/{tag}", server_metadata.add_tag, _P + "os-server-tags:update", "2.26", success=201),
    Route("DELETE", _SERVER + "/tags/{tag}", server_metadata.remove_tag, _P + "os-server-tags:delete", "2.26",
          success=204),
    Route("GET", _SERVER + "/os-instance-actions", instance_actions.index, _P + "os-instance-actions:list",
          until="2.20"),
    Route("GET", _SERVER + "/os-instance-actions", instance_actions.index, _P + "os-instance-actions:list",
          "2.21", "2.57", deleted=True),
    Route("GET", _SERVER + "/os-instance-actions", instance_actions.page, _P + "os-instance-actions:list", "2.58",
          query=instance_action_bodies.LIST, deleted=True),
    Route("GET", _SERVER + "/os-instance-actions/{request_id}", instance_actions.show, _P + "os-instance-actions:show",
          until="2.20"),
    Route("GET", _SERVER + "/os-instance-actions/{request_id}", instance_actions.show, _P + "os-instance-actions:show",
          "2.21", deleted=True),

    # migrations of servers
    Route("GET", "/os-migrations", migrations.index, _P + "os-migrations:index", query=migration_bodies.LIST),
    Route("GET", _SERVER + "/migrations", migrations.of_server, _P + "servers:migrations:index", "2.23"),
    Route("GET", _SERVER + "/migrations/{migration_id}", migrations.show, _P + "servers:migrations:show", "2.23"),
    Route("DELETE", _SERVER + "/migrations/{migration_id}", migrations.abort, _P + "servers:migrations:delete", "2.24",
          success=202),
    Route("POST", _SERVER + "/migrations/{migration_id}/action", migrations.force_complete,
          _P + "servers:migrations:force_complete", "2.22", success=202, body=migration_bodies.FORCE_COMPLETE),

    # tokens of consoles, for console proxies
    Route("GET", "/os-console-auth-tokens/{token}", consoles.refused_token, _P + "os-console-auth-tokens",
          until="2.30", query=console_bodies.SHOW_TOKEN),
    Route("GET", "/os-console-auth-tokens/{token}", consoles.show_token, _P + "os-console-auth-tokens", "2.31", "2.98",
          query=console_bodies.SHOW_TOKEN),
    Route("GET", "/os-console-auth-tokens/{token}", consoles.show_token_with_tls, _P + "os-console-auth-tokens",
          "2.99", query=console_bodies.SHOW_TOKEN),
    Route("POST", "/os-server-external-events", external_events.create, _P + "os-server-external-events:create",
          body=event_bodies.CREATE, large_keys=frozenset({"events"})),
    Route("POST", "/os-assisted-volume-snapshots", assisted_snapshots.create,
          _P + "os-assisted-volume-snapshots:create", body=assisted_bodies.CREATE),
    Route("DELETE", "/os-assisted-volume-snapshots/{snapshot_id}", assisted_snapshots.delete,
          _P + "os-assisted-volume-snapshots:delete", success=204, query=assisted_bodies.DELETE),

    # flavors
    Route("GET", "/flavors", flavors.index, "", query=flavor_bodies.LIST),
    Route("GET", "/flavors/detail", flavors.detail, "", query=flavor_bodies.LIST),
    Route("POST", "/flavors", flavors.create, _P + "os-flavor-manage:create", body=flavor_bodies.CREATE,
          large_keys=_FLAVOR_BODY),
    Route("GET", _FLAVOR, flavors.show, ""),
    Route("PUT", _FLAVOR, flavors.update, _P + "os-flavor-manage:update", "2.55", body=flavor_bodies.UPDATE,
          large_keys=_FLAVOR_BODY),
    Route("DELETE", _FLAVOR, flavors.delete, _P + "os-flavor-manage:delete", success=202),
    Route("POST", _FLAVOR + "/action", flavors.change_access, "", until="2.6", body=flavor_bodies.ACTION),
    Route("POST", _FLAVOR + "/action", flavors.change_access_strictly, "", "2.7", body=flavor_bodies.ACTION),
    Route("GET", _FLAVOR + "/os-flavor-access", flavors.access, _P + "os-flavor-access"),
    Route("GET", _FLAVOR + "/os-extra_specs", flavors.extra_specs, _P + "os-flavor-extra-specs:index"),
    Route("POST", _FLAVOR + "/os-extra_specs", flavors.add_extra_specs, _P + "os-flavor-extra-specs:create",
          until="2.85", body=flavor_bodies.ADD_SPECS, large_keys=_SPECS),
    Route("POST", _FLAVOR + "/os-extra_specs", flavors.add_known_extra_specs, _P + "os-flavor-extra-specs:create",
          "2.86", body=flavor_bodies.ADD_SPECS, large_keys=_SPECS),
    Route("GET", _FLAVOR + "/os-extra_specs/{key}", flavors.extra_spec, _P + "os-flavor-extra-specs:show"),
    Route("PUT", _FLAVOR + "/os-extra_specs/{key}", flavors.put_extra_spec, _P + "os-flavor-extra-specs:update",
          until="2.85", body=flavor_bodies.PUT_SPEC),
    Route("PUT", _FLAVOR + "/os-extra_specs/{key}", flavors.put_known_extra_spec,
          _P + "os-flavor-extra-specs:update", "2.86", body=flavor_bodies.PUT_SPEC),
    Route("DELETE", _FLAVOR + "/os-extra_specs/{key}", flavors.remove_extra_spec, _P + "os-flavor-extra-specs:delete"),

    # key pairs, whose handlers check the policy with the key's user as target
    Route("GET", "/os-keypairs", keypairs.index, "", until="2.34", query=keypair_bodies.LIST),
    Route("GET", "/os-keypairs", keypairs.page, "", "2.35", query=keypair_bodies.LIST),
    Route("POST", "/os-keypairs", keypairs.create, "", until="2.1", success=200, body=keypair_bodies.CREATE),
    Route("POST", "/os-keypairs", keypairs.create, "", "2.2", success=201, body=keypair_bodies.CREATE),
    Route("GET", "/os-keypairs/{name}", keypairs.show, "", query=keypair_bodies.SHOW),
    Route("DELETE", "/os-keypairs/{name}", keypairs.delete, "", until="2.1", success=202, query=keypair_bodies.SHOW),
    Route("DELETE", "/os-keypairs/{name}", keypairs.delete, "", "2.2", success=204, query=keypair_bodies.SHOW),

    # quotas, whose handlers check the policy with the project of the quota as target
    Route("GET", "/os-quota-sets/{project_id}", quota_sets.show, "", query=quota_bodies.SHOW),
    Route("GET", "/os-quota-sets/{project_id}/detail", quota_sets.detail, "", query=quota_bodies.SHOW),
    Route("GET", "/os-quota-sets/{project_id}/defaults", quota_sets.defaults, _P + "os-quota-sets:defaults",
          query=common.IGNORED),
    Route("PUT", "/os-quota-sets/{project_id}", quota_sets.update, _P + "os-quota-sets:update",
          body=quota_bodies.UPDATE, query=quota_bodies.SHOW),
    Route("DELETE", "/os-quota-sets/{project_id}", quota_sets.delete, _P + "os-quota-sets:delete", success=202,
          query=quota_bodies.SHOW),
    Route("GET", "/os-simple-tenant-usage", usage.index, _P + "os-simple-tenant-usage:list", query=usage_bodies.LIST),
    Route("GET", "/os-simple-tenant-usage/{project_id}", usage.show, "", query=usage_bodies.SHOW),
    Route("GET", "/os-instance_usage_audit_log", usage_audit.index, _P + "os-instance-usage-audit-log:list"),
    Route("GET", "/os-instance_usage_audit_log/{before}", usage_audit.show, _P + "os-instance-usage-audit-log:show"),
    Route("GET", "/os-quota-class-sets/{name}", quota_sets.show_class, _P + "os-quota-class-sets:show"),
    Route("PUT", "/os-quota-class-sets/{name}", quota_sets.update_class, _P + "os-quota-class-sets:update",
          body=quota_bodies.UPDATE_CLASS),

    # server groups
    Route("GET", "/os-server-groups", server_groups.index, _P + "os-server-groups:index", query=group_bodies.LIST),
    Route("POST", "/os-server-groups", server_groups.create, _P + "os-server-groups:create", body=group_bodies.CREATE),
    Route("GET", "/os-server-groups/{group_id}", server_groups.show, ""),
    Route("DELETE", "/os-server-groups/{group_id}", server_groups.delete, "", success=204),

    # hosts, services, zones
    Route("GET", "/os-services", services.index, _P + "os-services:list", query=service_bodies.LIST),
    Route("PUT", "/os-services/{service_id}", services.update_by_host, _P + "os-services:update", until="2.10",
          body=service_bodies.BY_HOST),
    Route("PUT", "/os-services/{service_id}", services.update_by_host, _P + "os-services:update", "2.11", "2.52",
          body=service_bodies.BY_HOST_FORCED),
    Route("PUT", "/os-services/{service_id}", services.update, _P + "os-services:update", "2.53",
          body=service_bodies.BY_UUID),
    Route("DELETE", "/os-services/{service_id}", services.delete_by_number, _P + "os-services:delete", until="2.52",
          success=204),
    Route("DELETE", "/os-services/{service_id}", services.delete, _P + "os-services:delete", "2.53", success=204),
    Route("GET", _HOST_ACTIONS, host_actions.index, "kilonova:host-actions:list", "2.53",
          query=host_action_bodies.LIST),
    Route("POST", _HOST_ACTIONS, host_actions.create, "kilonova:host-actions:create", "2.53", success=202,
          body=host_action_bodies.CREATE),
    Route("GET", _HOST_ACTIONS + "/{action_id}", host_actions.show, "kilonova:host-actions:show", "2.53"),
    Route("DELETE", _HOST_ACTIONS + "/{action_id}", host_actions.delete, "kilonova:host-actions:stop", "2.53",
          success=202),
    Route("GET", "/os-hosts", hosts.index, _P + "os-hosts:list", until="2.42", query=host_bodies.LIST),
    Route("GET", "/os-hosts/{host}", hosts.show, _P + "os-hosts:show", until="2.42"),
    Route("PUT", "/os-hosts/{host}", hosts.update, _P + "os-hosts:update", until="2.42", body=host_bodies.UPDATE),
    Route("GET", "/os-hosts/{host}/reboot", hosts.refused_power, _P + "os-hosts:reboot", until="2.42"),
    Route("GET", "/os-hosts/{host}/shutdown", hosts.refused_power, _P + "os-hosts:shutdown", until="2.42"),
    Route("GET", "/os-hosts/{host}/startup", hosts.refused_power, _P + "os-hosts:start", until="2.42"),
    Route("GET", "/os-hypervisors", hypervisors.index, _P + "os-hypervisors:list", until="2.52",
          query=hypervisor_bodies.LIST),
    Route("GET", "/os-hypervisors", hypervisors.index_by_uuid, _P + "os-hypervisors:list", "2.53",
          query=hypervisor_bodies.LIST),
    Route("GET", "/os-hypervisors/detail", hypervisors.detail, _P + "os-hypervisors:list-detail", until="2.52",
          query=hypervisor_bodies.LIST),
    Route("GET", "/os-hypervisors/detail", hypervisors.detail_by_uuid, _P + "os-hypervisors:list-detail", "2.53",
          query=hypervisor_bodies.LIST),
    Route("GET", "/os-hypervisors/statistics", hypervisors.statistics, _P + "os-hypervisors:statistics", until="2.87"),
    Route("GET", "/os-hypervisors/{hypervisor_id}", hypervisors.show, _P + "os-hypervisors:show", until="2.52",
          query=hypervisor_bodies.SHOW),
    Route("GET", "/os-hypervisors/{hypervisor_id}", hypervisors.show_by_uuid, _P + "os-hypervisors:show", "2.53",
          query=hypervisor_bodies.SHOW),
    Route("GET", "/os-hypervisors/{hypervisor_id}/search", hypervisors.search, _P + "os-hypervisors:search",
          until="2.52"),
    Route("GET", "/os-hypervisors/{hypervisor_id}/servers", hypervisors.servers_of, _P + "os-hypervisors:servers",
          until="2.52"),
    Route("GET", "/os-hypervisors/{hypervisor_id}/uptime", hypervisors.uptime, _P + "os-hypervisors:uptime",
          until="2.52"),
    Route("GET", "/os-hypervisors/{hypervisor_id}/uptime", hypervisors.uptime_by_uuid, _P + "os-hypervisors:uptime",
          "2.53", "2.87"),
    Route("POST", "/os-baremetal-nodes", hypervisors.refused_node, "", until="2.35", body=common.ANYTHING),
    Route("DELETE", "/os-baremetal-nodes/{id}", hypervisors.refused_node, "", until="2.35"),
    Route("POST", "/os-baremetal-nodes/{id}/action", hypervisors.refused_node, "", until="2.35",
          body=common.ANYTHING),
    Route("GET", "/os-availability-zone", availability_zones.index, _P + "os-availability-zone:list"),
    Route("GET", "/os-availability-zone/detail", availability_zones.detail, _P + "os-availability-zone:detail"),

    # aggregates
    Route("GET", "/os-aggregates", aggregates.index, _P + "os-aggregates:index"),
    Route("POST", "/os-aggregates", aggregates.create, _P + "os-aggregates:create", body=aggregate_bodies.CREATE),
    Route("GET", _AGGREGATE, aggregates.show, _P + "os-aggregates:show"),
    Route("PUT", _AGGREGATE, aggregates.update, _P + "os-aggregates:update", body=aggregate_bodies.UPDATE),
    Route("DELETE", _AGGREGATE, aggregates.delete, _P + "os-aggregates:delete"),
    Route("POST", _AGGREGATE + "/action", aggregates.act, "", body=aggregate_bodies.ACTION,
          large_keys=frozenset({"set_metadata"})),
    Route("POST", _AGGREGATE + "/images", aggregates.cache_images, "compute:aggregates:images", "2.81", success=202,
          body=aggregate_bodies.IMAGES),

    # proxies to the block storage service
    *(
        Route("GET", path, index, _P + f"os-volumes:{rule}", until=_PROXIED, query=volume_bodies.LIST)
        for path, index, rule in (
            ("/os-volumes", volumes.index, "list"),
            ("/os-volumes/detail", volumes.index, "detail"),
            ("/os-snapshots", volumes.snapshot_index, "snapshots:list"),
            ("/os-snapshots/detail", volumes.snapshot_index, "snapshots:detail"),
        )
    ),
    Route("POST", "/os-volumes", volumes.create, _P + "os-volumes:create", until=_PROXIED, body=volume_bodies.VOLUME,
          large_keys=frozenset({"volume"})),
    Route("GET", "/os-volumes/{volume_id}", volumes.show, _P + "os-volumes:show", until=_PROXIED),
    Route("DELETE", "/os-volumes/{volume_id}", volumes.delete, _P + "os-volumes:delete", until=_PROXIED, success=202),
    Route("POST", "/os-snapshots", volumes.snapshot_create, _P + "os-volumes:snapshots:create", until=_PROXIED,
          body=volume_bodies.SNAPSHOT),
    Route("GET", "/os-snapshots/{snapshot_id}", volumes.snapshot_show, _P + "os-volumes:snapshots:show",
          until=_PROXIED),
    Route("DELETE", "/os-snapshots/{snapshot_id}", volumes.snapshot_delete, _P + "os-volumes:snapshots:delete",
          until=_PROXIED, success=202),

    # proxies to the network service
    Route("GET", "/os-networks", networks.index, _P + "os-networks:list", until=_PROXIED),
    Route("GET", "/os-networks/{network_id}", networks.show, _P + "os-networks:show", until=_PROXIED),
    Route("GET", "/os-tenant-networks", networks.tenant_index, _P + "os-tenant-networks:list", until=_PROXIED),
    Route("GET", "/os-tenant-networks/{network_id}", networks.tenant_show, _P + "os-tenant-networks:show",
          until=_PROXIED),
    Route("GET", "/os-security-groups", security_group_proxy.index, _P + "os-security-groups:get", until=_PROXIED,
          query=security_group_bodies.GROUPS),
    Route("POST", "/os-security-groups", security_group_proxy.create, _P + "os-security-groups:create", until=_PROXIED,
          body=security_group_bodies.GROUP),
    Route("GET", "/os-security-groups/{group_id}", security_group_proxy.show, _P + "os-security-groups:show",
          until=_PROXIED),
    Route("PUT", "/os-security-groups/{group_id}", security_group_proxy.update, _P + "os-security-groups:update",
          until=_PROXIED, body=security_group_bodies.GROUP),
    Route("DELETE", "/os-security-groups/{group_id}", security_group_proxy.delete, _P + "os-security-groups:delete",
          until=_PROXIED, success=202),
    Route("POST", "/os-security-group-rules", security_group_proxy.create_rule, _P + "os-security-groups:rule:create",
          until=_PROXIED, body=security_group_bodies.RULE),
    Route("DELETE", "/os-security-group-rules/{rule_id}", security_group_proxy.delete_rule,
          _P + "os-security-groups:rule:delete", until=_PROXIED, success=202),
    Route("GET", "/os-floating-ips", floating_ips.index, _P + "os-floating-ips:list", until=_PROXIED),
    Route("POST", "/os-floating-ips", floating_ips.create, _P + "os-floating-ips:create", until=_PROXIED,
          body=floating_ip_bodies.FLOATING_IP),
    Route("GET", "/os-floating-ips/{floating_ip_id}", floating_ips.show, _P + "os-floating-ips:show", until=_PROXIED),
    Route("DELETE", "/os-floating-ips/{floating_ip_id}", floating_ips.delete, _P + "os-floating-ips:delete",
          until=_PROXIED, success=202),
    Route("GET", "/images", images.index, "", until=_PROXIED, query=image_bodies.LIST),
    Route("GET", "/images/detail", images.detail, "", until=_PROXIED, query=image_bodies.LIST),
    Route("GET", "/images/{image_id}", images.show, "", until=_PROXIED),
    Route("DELETE", "/images/{image_id}", images.delete, "", until=_PROXIED, success=204),
    Route("GET", "/images/{image_id}/metadata", images.metadata, "", until="2.38"),
    Route("POST", "/images/{image_id}/metadata", images.add, "", until="2.38", body=image_bodies.ALL,
          large_keys=_METADATA),
    Route("PUT", "/images/{image_id}/metadata", images.replace, "", until="2.38", body=image_bodies.ALL,
          large_keys=_METADATA),
    Route("GET", "/images/{image_id}/metadata/{key}", images.item, "", until="2.38"),
    Route("PUT", "/images/{image_id}/metadata/{key}", images.put, "", until="2.38", body=image_bodies.ITEM),
    Route("DELETE", "/images/{image_id}/metadata/{key}", images.remove, "", until="2.38", success=204),
    Route("GET", "/os-floating-ip-pools", floating_ips.pools, _P + "os-floating-ip-pools", until=_PROXIED),
)
# fmt: on

#: An older path for servers that boot from volumes, which exists until 2.102.
_VOLUMES_BOOT = "/os-volumes_boot"
ROUTES += tuple(
    replace(route, path=route.path.replace("/servers", _VOLUMES_BOOT, 1), until="2.102")
    for route in ROUTES
    if route.path in ("/servers", "/servers/detail", _SERVER, f"{_SERVER}/action")
)

# fmt: off
#: Removed operations: path -> methods, which are 410 at every microversion. Other methods of the
#: path may have rows.
GONE: dict[str, str] = {
    "/os-agents": "GET POST", "/os-agents/{id}": "PUT DELETE",
    "/os-cells": "GET POST", "/os-cells/capacities": "GET", "/os-cells/detail": "GET", "/os-cells/info": "GET",
    "/os-cells/sync_instances": "POST", "/os-cells/{id}": "GET PUT DELETE", "/os-cells/{id}/capacities": "GET",
    "/os-certificates": "POST", "/os-certificates/{id}": "GET",
    "/os-cloudpipe": "GET POST", "/os-cloudpipe/{id}": "PUT",
    "/os-fixed-ips/{id}": "GET", "/os-fixed-ips/{id}/action": "POST",
    "/os-floating-ip-dns": "GET", "/os-floating-ip-dns/{id}": "PUT DELETE",
    "/os-floating-ip-dns/{id}/entries/{entry}": "GET PUT DELETE",
    "/os-floating-ips-bulk": "GET POST", "/os-floating-ips-bulk/{id}": "GET PUT",
    "/os-fping": "GET", "/os-fping/{id}": "GET",
    "/os-networks": "POST", "/os-networks/add": "POST", "/os-networks/{network_id}": "DELETE",
    "/os-networks/{network_id}/action": "POST",
    "/os-security-group-default-rules": "GET POST", "/os-security-group-default-rules/{id}": "GET DELETE",
    "/os-tenant-networks": "POST", "/os-tenant-networks/{network_id}": "DELETE",
    "/servers/{server_id}/consoles": "GET POST", "/servers/{server_id}/consoles/{id}": "GET DELETE",
    "/servers/{server_id}/os-virtual-interfaces": "GET",
}
# fmt: on

#: The first part of every path, to distinguish resources from project ids.
NOUNS = frozenset(path.split("/")[1] for path in (*(route.path for route in ROUTES), *GONE))
