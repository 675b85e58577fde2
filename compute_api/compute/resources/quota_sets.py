# SPDX-License-Identifier: Apache-2.0
"""Handlers of quota sets, quota class sets and limits."""

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


def _list_resources(request: Request, resources: dict[str, Range]) -> list[str]:
    return [name for name, versions in resources.items() if request.version in versions]


def _check_policy(request: Request, operation: str, project_id: str) -> None:
    """Raise Forbidden unless the caller may see the quotas of this project.

    ``operation`` is the last part of the policy rule: show or detail.
    """
    request.require(f"os_compute_api:os-quota-sets:{operation}", {"project_id": project_id})


def _read_limits(
    request: Request, project_id: str, resources: dict[str, Range], user: str = ""
) -> dict[str, int]:
    numbers = request.read(request.services.quota.source(project_id))
    return {name: numbers.of(name, user) for name in _list_resources(request, resources)}


def show(request: Request, project_id: str) -> JsonObject:
    """Return the limits of a project, or of a user in it, for GET /os-quota-sets/{project}."""
    _check_policy(request, "show", project_id)
    limits = _read_limits(request, project_id, RESOURCES, request.query_value("user_id") or "")
    return {"quota_set": {"id": project_id, **limits}}


def defaults(request: Request, project_id: str) -> JsonObject:
    """Return the default limits for GET /os-quota-sets/{project}/defaults."""
    return {"quota_set": {"id": project_id, **_read_limits(request, quotas.CLASS, RESOURCES)}}


def detail(request: Request, project_id: str) -> JsonObject:
    """Return limits and usage of a project or user for GET /os-quota-sets/{project}/detail."""
    _check_policy(request, "detail", project_id)
    user, source = request.query_value("user_id") or "", request.services.quota.source(project_id)

    def work(tx: Connection) -> JsonObject:
        limits = source(tx)
        used = _count_usage(tx, limits, project_id, user)
        return {
            name: {"limit": limits.of(name, user), "in_use": used.get(name, 0), "reserved": 0}
            for name in _list_resources(request, RESOURCES)
        }

    return {"quota_set": {"id": project_id, **request.read(work)}}


def _count_usage(
    tx: Connection, limits: quotas.Numbers, project_id: str, user_id: str = ""
) -> dict[str, int]:
    """Return the usage of the user, or of the project, by the API's names of resources.

    If users cannot have separate limits, or without a user, the result is the usage of the project,
    and ``key_pairs`` is 0. ``server_groups`` is always the usage of the project.
    """
    user = user_id if limits.by_user else ""
    used = limits.read_usage(tx, project_id).get(user, {})
    counted = {name: used.get(limits.name(name), 0) for name in quotas.COUNTED}
    return {
        **counted,
        "server_groups": quotas.server_groups_used(tx, project_id),
        "key_pairs": keypairs.count(tx, user) if user else 0,
    }


def _check_within_project(values: dict[str, int], limits: quotas.Numbers) -> None:
    """Check new limits of a user (resource -> limit) against the limits of the project.

    The limit -1 means no limit.

    Raises:
        BadRequest: A limit is above the project's limit.
    """
    for name, limit in values.items():
        most = limits.of(name)
        if most != UNLIMITED and (limit == UNLIMITED or limit > most):
            raise errors.BadRequest(
                f"Quota limit {limit} for {name} must be less than or equal to {most}."
            )


def update(request: Request, project_id: str) -> JsonObject:
    """Set limits of a project or user for PUT /os-quota-sets/{project}, and return all limits.

    With Keystone's limits this changes no limit, because those are set in Keystone. The response
    then has the limits of the project, also for a user.

    Raises:
        BadRequest: Without ``force``: a limit is below the usage, or a user's limit is above the
            project's limit.
    """
    body = dict(request.body["quota_set"])
    force, user = is_true(body.pop("force", False)), request.query_value("user_id") or ""
    values = {name: int(value) for name, value in body.items()}
    source = request.services.quota.source(project_id)

    def work(tx: Connection) -> dict[str, int]:
        quotas.lock(tx, project_id)
        used = _count_usage(tx, quotas.QuotaLimits({}), project_id, user)
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
        return {name: limits.of(name, user) for name in _list_resources(request, RESOURCES)}

    if not request.services.quota.is_ours:
        return {"quota_set": _read_limits(request, project_id, RESOURCES)}
    return {"quota_set": request.write(work)}


def delete(request: Request, project_id: str) -> None:
    """Delete the limits of a project and of its users, so that the default limits apply.

    With a user in the query, delete only the user's limits, so that the project's limits apply.
    Keystone's limits stay unchanged.
    """
    if request.services.quota.is_ours:
        request.write(quotas.forget, project_id, request.query_value("user_id") or "")


# --- quota classes, of which only "default" has an effect, as in Nova ---
def show_class(request: Request, name: str) -> JsonObject:
    """Return the limits of a quota class for GET /os-quota-class-sets/{name}."""
    return {
        "quota_class_set": {
            "id": name,
            **_read_limits(request, _make_class_key(request, name), CLASS_RESOURCES),
        }
    }


def update_class(request: Request, name: str) -> JsonObject:
    """Set limits of a quota class, and return all its limits. Keystone's limits stay unchanged."""
    values = {key: int(value) for key, value in request.body["quota_class_set"].items()}
    key = _make_class_key(request, name)
    if request.services.quota.is_ours:
        request.write(quotas.put, key, "", values)
    return {"quota_class_set": _read_limits(request, key, CLASS_RESOURCES)}


def _make_class_key(request: Request, name: str) -> str:
    """Return the key of a class in the store. With Keystone's limits all names mean the default."""
    is_other = name != DEFAULT_CLASS and request.services.quota.is_ours
    return f"class:{name[:58]}" if is_other else quotas.CLASS


# --- limits ---
def _get_limit(resource: str) -> Get:
    return lambda row, view: row.of(resource)


def _get_usage(resource: str) -> Get:
    return lambda row, view: view.get(resource, 0)


LIMITS: tuple[Field, ...] = (
    Field("maxTotalInstances", _get_limit("instances")),
    Field("maxTotalCores", _get_limit("cores")),
    Field("maxTotalRAMSize", _get_limit("ram")),
    Field("maxServerMeta", _get_limit("metadata_items")),
    Field("maxImageMeta", _get_limit("metadata_items"), until="2.38"),
    Field("maxPersonality", _get_limit("injected_files"), until="2.56"),
    Field("maxPersonalitySize", _get_limit("injected_file_content_bytes"), until="2.56"),
    Field("maxTotalKeypairs", _get_limit("key_pairs")),
    Field("maxServerGroups", _get_limit("server_groups")),
    Field("maxServerGroupMembers", _get_limit("server_group_members")),
    Field("maxTotalFloatingIps", _get_limit("floating_ips"), until="2.35"),
    Field("maxSecurityGroups", _get_limit("security_groups"), until="2.35"),
    Field("maxSecurityGroupRules", _get_limit("security_group_rules"), until="2.35"),
    Field("totalInstancesUsed", _get_usage("instances")),
    Field("totalCoresUsed", _get_usage("cores")),
    Field("totalRAMUsed", _get_usage("ram")),
    Field("totalFloatingIpsUsed", _get_usage("floating_ips"), until="2.35"),
    Field("totalSecurityGroupsUsed", _get_usage("security_groups"), until="2.35"),
    Field("totalServerGroupsUsed", _get_usage("server_groups")),
)


def limits(request: Request) -> JsonObject:
    """Return limits and usage of a project for GET /limits.

    Raises:
        Forbidden: The project is not the caller's, and the policy does not allow that.
    """
    project_id = request.query_value("tenant_id") or request.context.project_id
    if project_id != request.context.project_id:
        request.require("os_compute_api:limits:other_project")

    source = request.services.quota.source(project_id)

    def work(tx: Connection) -> JsonObject:
        numbers = source(tx)
        return render(
            visible_fields(LIMITS, request.version), numbers, _count_usage(tx, numbers, project_id)
        )

    return {"limits": {"rate": [], "absolute": request.read(work)}}
