# SPDX-License-Identifier: Apache-2.0
"""/allocation_candidates: providers that can satisfy a whole request alone.

A host of Kilonova has all resources in one provider. Requests that need several providers are
refused: more than one group of resources, or same_subtree. A sharing provider is treated as any
other provider.
"""

from __future__ import annotations

import re

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.placement import inventories, provider_search, traits
from common.store.placement.provider_search import ProviderFilters
from common.store.rows import ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement import queries
from compute_api.placement.request import BadQuery, PlacementRequest
from compute_api.placement.resource_providers import refuse_unknown

DICTS, TRAITS, ALL_CLASSES, TREES, MAPPINGS = 12, 17, 27, 29, 34
#: Largest number of candidates in a response.
MOST = 10_000
_KEY = re.compile(r"(resources|required|member_of|in_tree)(.*)\Z")
_ALONE = "Kilonova only looks for single providers with all resources, because its hosts are such providers."


def index(request: PlacementRequest) -> ApiResponse:
    """Return the providers that can satisfy the request alone, with at most eight SQL statements.

    There are at most ``MOST`` candidates, or fewer by the parameter ``limit``.

    Raises:
        BadRequest: The query is invalid, names an unknown trait or class, or needs several
            providers.
    """
    suffix, filters = _parse_group(request)
    limit = request.query_value("limit")

    def work(tx: Connection) -> tuple[list[ProviderRow], JsonObject]:
        refuse_unknown(tx, filters)
        candidates = provider_search.find(tx, filters, min(int(limit[:9]), MOST) if limit else MOST)
        summarized = (
            candidates
            if request.version < TREES
            else provider_search.trees(tx, {row.root_uuid for row in candidates})
        )
        return candidates, _summarize(tx, request.version, summarized, filters)

    candidates, summaries = request.read(work)
    return ApiResponse(
        {
            "allocation_requests": [
                _view_request(request.version, row.uuid, suffix, filters) for row in candidates
            ],
            "provider_summaries": summaries,
        }
    )


def _parse_group(request: PlacementRequest) -> tuple[str, ProviderFilters]:
    """Return the suffix and the filters of the only group in the query.

    Raises:
        BadRequest: The query is invalid, or has several groups.
    """
    groups: dict[str, dict[str, list[str]]] = {}
    for key, values in request.query.items():
        match = _KEY.match(key)
        if match:
            groups.setdefault(match[2], {})[match[1]] = values
    _check_groups(request, groups)
    ((suffix, parts),) = groups.items()
    members = queries.members(parts.get("member_of", []), request.version, f"member_of{suffix}")
    required = queries.traits(parts.get("required", []), request.version, f"required{suffix}")
    if len(request.query.get("root_required", [])) > 1:
        raise BadQuery(
            "Query parameter 'root_required' may be specified only once.",
            "placement.query.duplicate_key",
        )
    root = queries.traits(
        request.query.get("root_required", []),
        min(request.version, queries.ANY_TRAITS - 1),
        "root_required",
    )
    return suffix, ProviderFilters(
        in_tree=queries.tree(parts["in_tree"][-1], f"in_tree{suffix}")
        if "in_tree" in parts
        else None,
        member_of=members.required,
        not_member_of=members.forbidden,
        required=required.required,
        forbidden=required.forbidden,
        resources=queries.resources(parts["resources"][-1]),
        root_required=root.required,
        root_forbidden=root.forbidden,
    )


def _check_groups(request: PlacementRequest, groups: dict[str, dict[str, list[str]]]) -> None:
    suffixes = [suffix for suffix, parts in groups.items() if "resources" in parts]
    for part, noun in (("required", "traits"), ("member_of", "member_of")):
        orphans = sorted(
            part + suffix
            for suffix, parts in groups.items()
            if part in parts and suffix not in suffixes
        )
        if orphans and "same_subtree" not in request.query:
            raise BadQuery(
                f"Found the following orphaned {noun} keys: {', '.join(orphans)}. All {part} parameters "
                "must be associated with resources."
            )
    if not suffixes:
        raise BadQuery(
            "At least one request group (`resources` or `resources{$S}`) is required.",
            "placement.query.missing_value",
        )
    if "same_subtree" in request.query:
        raise errors.BadRequest(f"same_subtree is not supported. {_ALONE}")
    if len(suffixes) < len(groups):
        raise BadQuery("All request groups must specify resources.")
    if len([suffix for suffix in suffixes if suffix]) > 1 and "group_policy" not in request.query:
        raise BadQuery(
            'The "group_policy" parameter is required when specifying more than one "resources{N}" '
            "parameter.",
            "placement.query.missing_value",
        )
    if len(groups) > 1:
        names = ", ".join(f"resources{suffix}" for suffix in sorted(groups))
        raise errors.BadRequest(f"Several groups of resources are not supported: {names}. {_ALONE}")


def _view_request(
    version: int, provider_uuid: str, suffix: str, filters: ProviderFilters
) -> JsonObject:
    resources = dict(filters.resources)
    if version < DICTS:
        return {
            "allocations": [{"resource_provider": {"uuid": provider_uuid}, "resources": resources}]
        }
    body: JsonObject = {"allocations": {provider_uuid: {"resources": resources}}}
    if version >= MAPPINGS:
        body["mappings"] = {suffix: [provider_uuid]}
    return body


def _summarize(
    tx: Connection, version: int, providers: list[ProviderRow], filters: ProviderFilters
) -> JsonObject:
    """Return resources, traits (since 1.17) and tree (since 1.29) of each provider by uuid.

    Before 1.27 only the requested resource classes are included. This takes three SQL statements,
    or two without traits.
    """
    ids = [row.id for row in providers]
    stock, used = inventories.of(tx, ids), inventories.usages(tx, ids)
    traits_by_id = traits.of(tx, ids) if version >= TRAITS else {}
    summaries: JsonObject = {}
    for row in providers:
        body: JsonObject = {
            "resources": {
                name: {
                    "capacity": inventories.capacity(inventory),
                    "used": used.get((row.id, name), 0),
                }
                for name, inventory in stock[row.id].items()
                if version >= ALL_CLASSES or name in filters.resources
            }
        }
        if version >= TRAITS:
            body["traits"] = traits_by_id[row.id]
        if version >= TREES:
            body |= {"parent_provider_uuid": row.parent_uuid, "root_provider_uuid": row.root_uuid}
        summaries[row.uuid] = body
    return summaries
