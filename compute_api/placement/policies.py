# SPDX-License-Identifier: Apache-2.0
"""The policy rules of the placement service, with Placement's names and defaults."""

from __future__ import annotations

from compute_api.http.policy_rules import RuleSet

_SERVICE = "rule:service_or_admin"
_READER = "rule:project_reader_or_admin or rule:service_api"

#: Check string of each rule.
RULES: dict[str, str] = {
    f"placement:{name}": _SERVICE
    for name in (
        "resource_providers:list",
        "resource_providers:create",
        "resource_providers:show",
        "resource_providers:update",
        "resource_providers:delete",
        "resource_classes:list",
        "resource_classes:create",
        "resource_classes:show",
        "resource_classes:update",
        "resource_classes:delete",
        "resource_providers:inventories:list",
        "resource_providers:inventories:create",
        "resource_providers:inventories:show",
        "resource_providers:inventories:update",
        "resource_providers:inventories:delete",
        "resource_providers:aggregates:list",
        "resource_providers:aggregates:update",
        "resource_providers:usages",
        "traits:list",
        "traits:show",
        "traits:update",
        "traits:delete",
        "resource_providers:traits:list",
        "resource_providers:traits:update",
        "resource_providers:traits:delete",
        "allocations:manage",
        "allocations:list",
        "allocations:update",
        "allocations:delete",
        "resource_providers:allocations:list",
        "allocation_candidates:list",
        "reshaper:reshape",
    )
} | {"placement:usages": _READER}

PLACEMENT_RULES = RuleSet(RULES)
