# SPDX-License-Identifier: Apache-2.0
"""Who may do what: Nova's rule names and defaults, an operator's file over them, and deny for all else.

Called by the dispatcher for every operation, by handlers for parts of one, and by views for single fields. The
target is what the database says about a thing (its project and user), never what a request claims. Roles imply
one another: admin is a manager, a manager a member, a member a reader.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import errors
from common.context import RequestContext

ADMIN = "rule:context_is_admin"
MANAGER = "rule:project_manager_or_admin"
MEMBER = "rule:project_member_or_admin"
READER = "rule:project_reader_or_admin"
SELF = "(rule:context_is_admin) or user_id:%(user_id)s"
ANYBODY = "@"
NOBODY = "!"

#: What the rules below are made of; the names are those that operators' files refer to.
BASES = {
    "context_is_admin": "role:admin",
    "admin_or_owner": "is_admin:True or project_id:%(project_id)s",
    "admin_api": "is_admin:True",
    "project_manager_api": "role:manager and project_id:%(project_id)s",
    "project_member_api": "role:member and project_id:%(project_id)s",
    "project_reader_api": "role:reader and project_id:%(project_id)s",
    "project_admin_api": "role:admin and project_id:%(project_id)s",
    "project_manager_or_admin": "rule:project_manager_api or rule:context_is_admin",
    "project_member_or_admin": "rule:project_member_api or rule:context_is_admin",
    "project_reader_or_admin": "rule:project_reader_api or rule:context_is_admin",
    "service_api": "role:service",
    "service_or_admin": "rule:service_api or rule:context_is_admin",
}

_API = "os_compute_api:"
#: Rule -> who may, in the order of the operations they guard.
RULES: dict[str, str] = {
    _API + "extensions": ANYBODY,
    _API + "limits": ANYBODY,
    _API + "limits:other_project": ADMIN,
    _API + "servers:index": READER,
    _API + "servers:detail": READER,
    _API + "servers:show": READER,
    _API + "os-volumes-attachments:index": READER,
    _API + "os-volumes-attachments:show": READER,
    "compute:server:topology:index": READER,
    "compute:server:topology:host:index": ADMIN,
    _API + "servers:index:get_all_tenants": ADMIN,
    _API + "servers:detail:get_all_tenants": ADMIN,
    _API + "servers:allow_all_filters": ADMIN,
    _API + "servers:show:host_status": ADMIN,
    _API + "servers:show:host_status:unknown-only": ADMIN,
    _API + "servers:show:flavor-extra-specs": READER,
    _API + "os-extended-server-attributes": ADMIN,
    _API + "servers:create": MEMBER,
    _API + "servers:create:forced_host": ADMIN,
    "compute:servers:create:requested_destination": ADMIN,
    _API + "servers:create:attach_network": MEMBER,
    _API + "servers:create:attach_volume": MEMBER,
    _API + "servers:create:trusted_certs": MEMBER,
    _API + "servers:create:zero_disk_flavor": ADMIN,
    "network:attach_external_network": ADMIN,
    _API + "servers:update": MEMBER,
    _API + "servers:delete": MEMBER,
    _API + "servers:start": MEMBER,
    _API + "servers:stop": MEMBER,
    _API + "servers:reboot": MEMBER,
    _API + "servers:rebuild": MEMBER,
    _API + "servers:rebuild:trusted_certs": MEMBER,
    _API + "servers:create_image": MEMBER,
    _API + "servers:create_image:allow_volume_backed": MEMBER,
    _API + "servers:trigger_crash_dump": MEMBER,
    _API + "servers:resize": MEMBER,
    _API + "servers:confirm_resize": MEMBER,
    _API + "servers:revert_resize": MEMBER,
    _API + "os-migrate-server:migrate": MANAGER,
    _API + "os-migrate-server:migrate:host": ADMIN,
    _API + "os-migrate-server:migrate_live": MANAGER,
    _API + "os-migrate-server:migrate_live:host": ADMIN,
    _API + "os-evacuate": ADMIN,
    _API + "servers:migrations:index": MANAGER,
    _API + "servers:migrations:index:host": ADMIN,
    _API + "servers:migrations:show": ADMIN,
    _API + "servers:migrations:force_complete": MANAGER,
    _API + "servers:migrations:delete": MANAGER,
    _API + "os-migrations:index": MANAGER,
    _API + "os-migrations:index:all_projects": ADMIN,
    _API + "os-migrations:index:host": ADMIN,
    _API + "os-create-backup": MEMBER,
    _API + "os-pause-server:pause": MEMBER,
    _API + "os-pause-server:unpause": MEMBER,
    _API + "os-suspend-server:suspend": MEMBER,
    _API + "os-suspend-server:resume": MEMBER,
    _API + "os-rescue": MEMBER,
    _API + "os-unrescue": MEMBER,
    _API + "os-admin-password": MEMBER,
    _API + "os-lock-server:lock": MEMBER,
    _API + "os-lock-server:unlock": MEMBER,
    _API + "os-lock-server:unlock:unlock_override": ADMIN,
    _API + "os-admin-actions:reset_state": ADMIN,
    _API + "os-admin-actions:inject_network_info": ADMIN,
    _API + "os-shelve:shelve": MEMBER,
    _API + "os-shelve:shelve_offload": ADMIN,
    _API + "os-shelve:unshelve": MEMBER,
    _API + "os-shelve:unshelve_to_host": ADMIN,
    _API + "os-deferred-delete:restore": MEMBER,
    _API + "os-deferred-delete:force": MEMBER,
    _API + "os-console-output": MEMBER,
    _API + "os-remote-consoles": MEMBER,
    _API + "os-console-auth-tokens": ADMIN,
    _API + "os-server-diagnostics": ADMIN,
    _API + "os-server-password:show": READER,
    _API + "os-server-password:clear": MEMBER,
    _API + "server-metadata:index": READER,
    _API + "server-metadata:show": READER,
    _API + "server-metadata:create": MEMBER,
    _API + "server-metadata:update_all": MEMBER,
    _API + "server-metadata:update": MEMBER,
    _API + "server-metadata:delete": MEMBER,
    _API + "os-server-tags:index": READER,
    _API + "os-server-tags:show": READER,
    _API + "os-server-tags:update": MEMBER,
    _API + "os-server-tags:update_all": MEMBER,
    _API + "os-server-tags:delete": MEMBER,
    _API + "os-server-tags:delete_all": MEMBER,
    _API + "ips:index": READER,
    _API + "ips:show": READER,
    _API + "os-attach-interfaces:list": READER,
    _API + "os-attach-interfaces:show": READER,
    _API + "os-attach-interfaces:create": MEMBER,
    _API + "os-attach-interfaces:delete": MEMBER,
    _API + "os-security-groups:list": READER,
    _API + "os-security-groups:add": MEMBER,
    _API + "os-security-groups:remove": MEMBER,
    _API + "os-security-groups:get": READER,
    _API + "os-security-groups:show": READER,
    _API + "os-security-groups:create": MEMBER,
    _API + "os-security-groups:update": MEMBER,
    _API + "os-security-groups:delete": MEMBER,
    _API + "os-security-groups:rule:create": MEMBER,
    _API + "os-security-groups:rule:delete": MEMBER,
    _API + "os-networks:list": READER,
    _API + "os-networks:show": READER,
    _API + "os-tenant-networks:list": READER,
    _API + "os-tenant-networks:show": READER,
    _API + "os-floating-ips:list": READER,
    _API + "os-floating-ips:show": READER,
    _API + "os-floating-ips:create": MEMBER,
    _API + "os-floating-ips:delete": MEMBER,
    _API + "os-floating-ips:add": MEMBER,
    _API + "os-floating-ips:remove": MEMBER,
    _API + "os-floating-ip-pools": ANYBODY,
    _API + "os-multinic:add": MEMBER,
    _API + "os-multinic:remove": MEMBER,
    _API + "os-server-external-events:create": "rule:service_or_admin",
    _API + "os-instance-actions:list": READER,
    _API + "os-instance-actions:show": READER,
    _API + "os-instance-actions:events": ADMIN,
    _API + "os-instance-actions:events:details": ADMIN,
    _API + "os-flavor-manage:create": ADMIN,
    _API + "os-flavor-manage:update": ADMIN,
    _API + "os-flavor-manage:delete": ADMIN,
    _API + "os-flavor-access": ADMIN,
    _API + "os-flavor-access:add_tenant_access": ADMIN,
    _API + "os-flavor-access:remove_tenant_access": ADMIN,
    _API + "os-flavor-extra-specs:index": READER,
    _API + "os-flavor-extra-specs:show": READER,
    _API + "os-flavor-extra-specs:create": ADMIN,
    _API + "os-flavor-extra-specs:update": ADMIN,
    _API + "os-flavor-extra-specs:delete": ADMIN,
    _API + "os-keypairs:index": SELF,
    _API + "os-keypairs:show": SELF,
    _API + "os-keypairs:create": SELF,
    _API + "os-keypairs:delete": SELF,
    _API + "os-server-groups:index": READER,
    _API + "os-server-groups:index:all_projects": ADMIN,
    _API + "os-server-groups:show": READER,
    _API + "os-server-groups:create": MEMBER,
    _API + "os-server-groups:delete": MEMBER,
    _API + "os-quota-sets:show": READER,
    _API + "os-quota-sets:detail": READER,
    _API + "os-quota-sets:defaults": ANYBODY,
    _API + "os-quota-sets:update": ADMIN,
    _API + "os-quota-sets:delete": ADMIN,
    _API + "os-instance-usage-audit-log:list": ADMIN,
    _API + "os-instance-usage-audit-log:show": ADMIN,
    _API + "os-simple-tenant-usage:list": ADMIN,
    _API + "os-simple-tenant-usage:show": READER,
    _API + "os-quota-class-sets:show": ADMIN,
    _API + "os-quota-class-sets:update": ADMIN,
    _API + "os-services:list": ADMIN,
    _API + "os-services:update": ADMIN,
    _API + "os-services:delete": ADMIN,
    _API + "os-hosts:list": ADMIN,
    _API + "os-hosts:show": ADMIN,
    _API + "os-hosts:update": ADMIN,
    _API + "os-hosts:reboot": ADMIN,
    _API + "os-hosts:shutdown": ADMIN,
    _API + "os-hosts:start": ADMIN,
    _API + "os-hypervisors:list": ADMIN,
    _API + "os-hypervisors:list-detail": ADMIN,
    _API + "os-hypervisors:show": ADMIN,
    _API + "os-hypervisors:statistics": ADMIN,
    _API + "os-hypervisors:uptime": ADMIN,
    _API + "os-hypervisors:search": ADMIN,
    _API + "os-hypervisors:servers": ADMIN,
    _API + "os-availability-zone:list": ANYBODY,
    _API + "os-availability-zone:detail": ADMIN,
    _API + "os-aggregates:index": ADMIN,
    _API + "os-aggregates:show": ADMIN,
    _API + "os-aggregates:create": ADMIN,
    _API + "os-aggregates:update": ADMIN,
    _API + "os-aggregates:delete": ADMIN,
    _API + "os-aggregates:add_host": ADMIN,
    _API + "os-aggregates:remove_host": ADMIN,
    _API + "os-aggregates:set_metadata": ADMIN,
    "compute:aggregates:images": ADMIN,
}

_IMPLIED = {"admin": ("manager", "member", "reader"), "manager": ("member", "reader"), "member": ("reader",)}


@functools.lru_cache(maxsize=256)
def implied(roles: tuple[str, ...]) -> tuple[str, ...]:
    """The roles and those that they imply, in lower case."""
    held = {role.lower() for role in roles}
    return tuple(sorted(held.union(*(_IMPLIED.get(role, ()) for role in held))))


class Policy:
    """The rules in force in this process.

    Args:
        policy_file: an oslo.policy file in Nova's rule names; its rules replace the defaults of the same name, and
            it is read again when it changes. None: the defaults.
        rules: the defaults; of the placement service they are others.
    """

    def __init__(self, policy_file: str | None = None, rules: Mapping[str, str] = RULES) -> None:
        from oslo_config import cfg
        from oslo_policy import opts, policy
        if policy_file and not Path(policy_file).is_file():
            raise FileNotFoundError(f"policy_file: there is no file {policy_file}")
        conf = cfg.ConfigOpts()
        conf([], project="kilonova", default_config_files=[], default_config_dirs=[])
        opts.set_defaults(conf, policy_file=policy_file or "")
        conf.set_override("policy_dirs", [], group="oslo_policy")
        self._enforcer = policy.Enforcer(conf, policy_file=policy_file, use_conf=policy_file is not None)
        scope = ["project"]
        defaults = [policy.RuleDefault(name, check, scope_types=scope) for name, check in {**BASES, **rules}.items()]
        self._known = {*BASES, *rules}
        self._enforcer.register_defaults(defaults)
        self._refusals = (policy.PolicyNotAuthorized, policy.InvalidScope)
        if policy_file:
            self._enforcer.load_rules()
        else:       # without a file nobody else brings the defaults into force
            self._enforcer.set_rules({default.name: default.check for default in defaults}, use_conf=False)

    def allows(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> bool:
        """May the caller do it to the target (without one: to things of their own)? Unknown rules deny."""
        if rule not in self._known:
            return False
        roles = implied(context.roles)
        caller = {"user_id": context.user_id, "project_id": context.project_id, "roles": list(roles),
                  "is_admin": "admin" in roles, "is_admin_project": True, "system_scope": context.system_scope,
                  "domain_id": context.domain_id}
        if target is None:
            target = {"project_id": context.project_id, "user_id": context.user_id}
        try:
            return bool(self._enforcer.enforce(rule, dict(target), caller))
        except self._refusals:
            return False

    def require(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> None:
        """Raises Forbidden when they may not."""
        if not self.allows(rule, context, target):
            raise errors.Forbidden(f"Policy doesn't allow {rule} to be performed.")
