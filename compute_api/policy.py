# SPDX-License-Identifier: Apache-2.0
"""Who may do what: Nova's rule names and defaults, an operator's file over them, and deny for all else.

Called by the dispatcher for every operation, by handlers for parts of one, and by views for single fields. The
target is what the database says about a thing (its project and user), never what a request claims. Roles imply
one another: admin is a manager, a manager a member, a member a reader.
"""
from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oslo_config import cfg

from common import errors
from common.config import ConfigError
from common.context import RequestContext

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class InForce:
    """A rule as it holds: who may, and who says so: "default", or file and line."""

    check: str
    origin: str


class Policy:
    """The rules in force in this process.

    A file that changes is read again, by the next question; one that is broken then, or gone, leaves the rules as they
    were, and is told of once.

    Args:
        policy_file: an oslo.policy file in Nova's rule names; its rules replace the defaults of the same name.
            None: the defaults.
        rules: the defaults; of the placement service they are others.

    Raises:
        ConfigError: the file cannot be taken over; the text begins with its name and the line.
    """

    def __init__(self, policy_file: str | None = None, rules: Mapping[str, str] = RULES) -> None:
        from oslo_policy import opts, policy
        conf = cfg.ConfigOpts()
        conf([], project="kilonova", default_config_files=[], default_config_dirs=[])
        opts.set_defaults(conf, policy_file="")
        conf.set_override("policy_dirs", [], group="oslo_policy")
        self._enforcer = policy.Enforcer(conf, use_conf=False)
        self._defaults = {**BASES, **rules}
        self._enforcer.register_defaults(
            [policy.RuleDefault(name, check, scope_types=["project"]) for name, check in rules.items()])
        self._refusals = (policy.PolicyNotAuthorized, policy.InvalidScope)
        self._file, self._reading = policy_file, threading.Lock()
        self._stamp = self._stamp_now()
        self._take_over()

    def _stamp_now(self) -> tuple[int, ...]:
        """What changes with the file; () when it is not there."""
        try:
            found = os.stat(self._file) if self._file else None
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else ()

    def _read_again(self) -> None:
        """Take a changed file over; one thread does, the others go on under the rules that they have."""
        if self._stamp_now() == self._stamp or not self._reading.acquire(blocking=False):
            return
        try:
            self._stamp = self._stamp_now()
            self._take_over()
            logger.info("%s has changed and is in force", self._file)
        except ConfigError as problem:
            logger.error("the policy file has changed and cannot be used, the rules stay as they were: %s", problem)
        finally:
            self._reading.release()

    def _take_over(self) -> None:
        from compute_api import policy_file
        taken = (policy_file.take_over(self._file, self._defaults) if self._file
                 else policy_file.Taken(self._defaults, {}, ()))
        for warning in taken.warnings:
            logger.warning(warning)
        self._enforcer.set_rules({name: policy_file.parsed(name, check) for name, check in taken.checks.items()})
        self._in_force = {name: InForce(str(check), f"{self._file}:{taken.lines[name]}" if name in taken.lines
                                        else "default") for name, check in taken.checks.items()}

    @property
    def in_force(self) -> Mapping[str, InForce]:
        """Every rule as it holds now, in the order of the operations; an operator's own ones come last."""
        return self._in_force

    def allows(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> bool:
        """May the caller do it to the target (without one: to things of their own)? Unknown rules deny."""
        if self._file:
            self._read_again()
        if rule not in self._in_force:
            return False
        caller = {"user_id": context.user_id, "project_id": context.project_id, "roles": list(implied(context.roles)),
                  "user_domain_id": context.user_domain_id, "project_domain_id": context.project_domain_id,
                  "domain_id": context.domain_id, "system_scope": context.system_scope,
                  "service_roles": list(context.service_roles), "is_admin_project": True}
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


def configured(conf: cfg.ConfigOpts, section: str, rules: Mapping[str, str] = RULES) -> Policy:
    """The policy that the option policy_file of this section names; a relative path begins at the configuration file.

    Raises:
        ConfigError: the file cannot be taken over.
    """
    name = conf[section].policy_file
    try:
        return Policy(name and (conf.find_file(name) or name), rules)
    except ConfigError as problem:
        raise ConfigError(f"[{section}] policy_file {problem}") from problem
