# SPDX-License-Identifier: Apache-2.0
"""Names in an operator's policy file that Nova knows and no operation here asks for.

Read by ``policy`` when it takes a file over: former names go on to mean what has replaced them, and names of what this
cloud does not do are told from slips of the pen.
"""
from __future__ import annotations

from collections.abc import Iterator

_API = "os_compute_api:"
_OWNER, _ADMIN = "rule:admin_or_owner", "rule:admin_api"
_FORMER_ADMIN = "rule:context_is_admin"

#: Former name -> its default then, and the names that stand for it now.
FORMER: dict[str, tuple[str, tuple[str, ...]]] = {
    _API + name: (default, tuple(_API + new for new in names.split())) for name, default, names in (
        ("os-attach-interfaces", _OWNER, "os-attach-interfaces:list os-attach-interfaces:show "
                                         "os-attach-interfaces:create os-attach-interfaces:delete"),
        ("os-baremetal-nodes", _ADMIN, "os-baremetal-nodes:list os-baremetal-nodes:show"),
        ("os-deferred-delete", _OWNER, "os-deferred-delete:restore os-deferred-delete:force"),
        ("os-flavor-extra-specs:index", _OWNER, "servers:show:flavor-extra-specs"),
        ("os-floating-ips", _OWNER, "os-floating-ips:add os-floating-ips:remove os-floating-ips:list "
                                    "os-floating-ips:create os-floating-ips:show os-floating-ips:delete"),
        ("os-hosts", _ADMIN, "os-hosts:list os-hosts:show os-hosts:update os-hosts:reboot os-hosts:shutdown "
                             "os-hosts:start"),
        ("os-hypervisors", _ADMIN, "os-hypervisors:list os-hypervisors:list-detail os-hypervisors:statistics "
                                   "os-hypervisors:show os-hypervisors:uptime os-hypervisors:search "
                                   "os-hypervisors:servers"),
        ("os-instance-actions", _OWNER, "os-instance-actions:list os-instance-actions:show"),
        ("os-instance-usage-audit-log", _ADMIN, "os-instance-usage-audit-log:list os-instance-usage-audit-log:show"),
        ("os-migrate-server:migrate_live", _FORMER_ADMIN, "os-migrate-server:migrate_live:host"),
        ("os-migrations:index", _FORMER_ADMIN, "os-migrations:index:all_projects os-migrations:index:host"),
        ("os-multinic", _OWNER, "os-multinic:add os-multinic:remove"),
        ("os-networks:view", _OWNER, "os-networks:list os-networks:show"),
        ("os-rescue", _OWNER, "os-unrescue"),
        ("os-security-groups", _OWNER, "os-security-groups:get os-security-groups:show os-security-groups:create "
                                       "os-security-groups:update os-security-groups:delete "
                                       "os-security-groups:rule:create os-security-groups:rule:delete "
                                       "os-security-groups:list os-security-groups:add os-security-groups:remove"),
        ("os-server-password", _OWNER, "os-server-password:show os-server-password:clear"),
        ("os-services", _ADMIN, "os-services:list os-services:update os-services:delete"),
        ("os-tenant-networks", _OWNER, "os-tenant-networks:list os-tenant-networks:show"),
        ("os-used-limits", _ADMIN, "limits:other_project"),
        ("os-volumes", _OWNER, "os-volumes:list os-volumes:create os-volumes:detail os-volumes:show os-volumes:delete "
                               "os-volumes:snapshots:list os-volumes:snapshots:create os-volumes:snapshots:detail "
                               "os-volumes:snapshots:show os-volumes:snapshots:delete"),
        ("servers:migrations:index", _FORMER_ADMIN, "servers:migrations:index:host"),
    )}

#: Nova's rules of what this cloud does not do; where it learns to, the rule moves to ``policy.RULES``.
NOT_HERE = frozenset({
    "compute:servers:resize:cross_cell", *(_API + name for name in (
        "os-assisted-volume-snapshots:create", "os-assisted-volume-snapshots:delete", "os-baremetal-nodes:list",
        "os-baremetal-nodes:show", "os-server-shares:index", "os-server-shares:create", "os-server-shares:show",
        "os-server-shares:delete", "os-volumes:list", "os-volumes:create", "os-volumes:detail", "os-volumes:show",
        "os-volumes:delete", "os-volumes:snapshots:list", "os-volumes:snapshots:create",
        "os-volumes:snapshots:detail", "os-volumes:snapshots:show", "os-volumes:snapshots:delete",
        "os-volumes-attachments:create", "os-volumes-attachments:update", "os-volumes-attachments:swap",
        "os-volumes-attachments:delete"))})


def former(name: str) -> Iterator[tuple[str, str]]:
    """What a rule was once called, and what was the default under that name."""
    return ((old, default) for old, (default, names) in FORMER.items() if name in names)
