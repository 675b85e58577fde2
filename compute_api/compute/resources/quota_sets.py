# SPDX-License-Identifier: Apache-2.0
"""Quota sets, quota class sets and limits."""

from __future__ import annotations

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.tenants import keypairs, quotas
from compute_api.compute.request.request import Request
from compute_api.compute.schemas.quota_sets import CLASS_RESOURCES, RESOURCES
from compute_api.compute.views.fields import Field, Get, render, visible_fields
from compute_api.http.microversions import Range
from compute_api.http.validation import is_true

DEFAULT_CLASS, UNLIMITED = "default", -1


def _known(request: Request, resources: dict[str, Range]) -> list[str]:
    return [name for name, versions in resources.items() if request.version in versions]


def _checked(request: Request, operation: str, project_id: str) -> None:
    """May the caller look at this project's quota?"""
    request.require(f"os_compute_api:os-quota-sets:{operation}", {"project_id": project_id})


def _limits(
    request: Request, project_id: str, resources: dict[str, Range], user: str = ""
) -> dict[str, int]:
    found = request.read(request.services.quota.source(project_id))
    return {name: found.of(name, user) for name in _known(request, resources)}


def show(request: Request, project_id: str) -> JsonObject:
    """GET /os-quota-sets/{project}"""
    _checked(request, "show", project_id)
    limits = _limits(request, project_id, RESOURCES, request.first("user_id") or "")
    return {"quota_set": {"id": project_id, **limits}}


def defaults(request: Request, project_id: str) -> JsonObject:
    """GET /os-quota-sets/{project}/defaults"""
    return {"quota_set": {"id": project_id, **_limits(request, quotas.CLASS, RESOURCES)}}


def detail(request: Request, project_id: str) -> JsonObject:
    """GET /os-quota-sets/{project}/detail"""
    _checked(request, "detail", project_id)
    user, source = request.first("user_id") or "", request.services.quota.source(project_id)

    def work(tx: Connection) -> JsonObject:
        limits = source(tx)
        used = _used(tx, limits, project_id, user)
        return {
            name: {"limit": limits.of(name, user), "in_use": used.get(name, 0), "reserved": 0}
            for name in _known(request, RESOURCES)
        }

    return {"quota_set": {"id": project_id, **request.read(work)}}


def _used(
    tx: Connection, limits: quotas.Numbers, project_id: str, user_id: str = ""
) -> dict[str, int]:
    """By the API's names, of the user or of the project; users who can have no limits of their own
    are not counted."""
    user = user_id if limits.by_user else ""
    used = limits.used(tx, project_id).get(user, {})
    counted = {name: used.get(limits.name(name), 0) for name in quotas.COUNTED}
    return {
        **counted,
        "server_groups": quotas.server_groups_used(tx, project_id),
        "key_pairs": keypairs.count(tx, user) if user else 0,
    }


def _check_within_project(values: dict[str, int], limits: quotas.Numbers) -> None:
    """Check limits of a user; -1 is no limit.

    Raises:
        BadRequest: one is above the project's.
    """
    for name, limit in values.items():
        most = limits.of(name)
        if most != UNLIMITED and (limit == UNLIMITED or limit > most):
            raise errors.BadRequest(
                f"Quota limit {limit} for {name} must be less than or equal to {most}."
            )


def update(request: Request, project_id: str) -> JsonObject:
    """PUT /os-quota-sets/{project}: limits below what is in use, and a user's limits above those of
    the project, only with force. Keystone's are set there."""
    given = dict(request.body["quota_set"])
    force, user = is_true(given.pop("force", False)), request.first("user_id") or ""
    values = {name: int(value) for name, value in given.items()}
    source = request.services.quota.source(project_id)

    def work(tx: Connection) -> dict[str, int]:
        quotas.lock(tx, project_id)
        used = _used(tx, quotas.QuotaLimits({}), project_id, user)
        for name, limit in values.items():
            if 0 <= limit < used.get(name, 0) and not force:
                raise errors.BadRequest(
                    f"Quota limit {limit} for {name} must be greater than or equal to already used "
                    f"{used[name]}."
                )
        if user and not force:
            _check_within_project(values, source(tx))
        quotas.put(tx, project_id, user, values)
        limits = source(tx)
        return {name: limits.of(name, user) for name in _known(request, RESOURCES)}

    if not request.services.quota.is_ours:
        return {"quota_set": _limits(request, project_id, RESOURCES)}
    return {"quota_set": request.write(work)}


def delete(request: Request, project_id: str) -> None:
    """DELETE /os-quota-sets/{project}: back to the class's limits. Keystone's stay."""
    if request.services.quota.is_ours:
        request.write(quotas.forget, project_id, request.first("user_id") or "")


# --- classes: only "default" has an effect, as in the API's other implementations ---
def show_class(request: Request, name: str) -> JsonObject:
    """GET /os-quota-class-sets/{name}"""
    return {
        "quota_class_set": {
            "id": name,
            **_limits(request, _class_key(request, name), CLASS_RESOURCES),
        }
    }


def update_class(request: Request, name: str) -> JsonObject:
    """PUT /os-quota-class-sets/{name}. Keystone's are set there."""
    values = {key: int(value) for key, value in request.body["quota_class_set"].items()}
    key = _class_key(request, name)
    if request.services.quota.is_ours:
        request.write(quotas.put, key, "", values)
    return {"quota_class_set": _limits(request, key, CLASS_RESOURCES)}


def _class_key(request: Request, name: str) -> str:
    """Keystone has one class only, whatever it is called."""
    is_other = name != DEFAULT_CLASS and request.services.quota.is_ours
    return f"class:{name[:58]}" if is_other else quotas.CLASS


# --- limits ---
def _limit(resource: str) -> Get:
    return lambda row, view: row.of(resource)


def _usage(resource: str) -> Get:
    return lambda row, view: view.get(resource, 0)


LIMITS: tuple[Field, ...] = (
    Field("maxTotalInstances", _limit("instances")),
    Field("maxTotalCores", _limit("cores")),
    Field("maxTotalRAMSize", _limit("ram")),
    Field("maxServerMeta", _limit("metadata_items")),
    Field("maxImageMeta", _limit("metadata_items"), until="2.38"),
    Field("maxPersonality", _limit("injected_files"), until="2.56"),
    Field("maxPersonalitySize", _limit("injected_file_content_bytes"), until="2.56"),
    Field("maxTotalKeypairs", _limit("key_pairs")),
    Field("maxServerGroups", _limit("server_groups")),
    Field("maxServerGroupMembers", _limit("server_group_members")),
    Field("maxTotalFloatingIps", _limit("floating_ips"), until="2.35"),
    Field("maxSecurityGroups", _limit("security_groups"), until="2.35"),
    Field("maxSecurityGroupRules", _limit("security_group_rules"), until="2.35"),
    Field("totalInstancesUsed", _usage("instances")),
    Field("totalCoresUsed", _usage("cores")),
    Field("totalRAMUsed", _usage("ram")),
    Field("totalFloatingIpsUsed", _usage("floating_ips"), until="2.35"),
    Field("totalSecurityGroupsUsed", _usage("security_groups"), until="2.35"),
    Field("totalServerGroupsUsed", _usage("server_groups")),
)


def limits(request: Request) -> JsonObject:
    """GET /limits"""
    project_id = request.first("tenant_id") or request.context.project_id
    if project_id != request.context.project_id:
        request.require("os_compute_api:limits:other_project")

    source = request.services.quota.source(project_id)

    def work(tx: Connection) -> JsonObject:
        found = source(tx)
        return render(visible_fields(LIMITS, request.version), found, _used(tx, found, project_id))

    return {"limits": {"rate": [], "absolute": request.read(work)}}
