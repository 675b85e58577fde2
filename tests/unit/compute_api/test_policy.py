# SPDX-License-Identifier: Apache-2.0
"""Policy decisions: the default rules, implied roles, an operator's file, and unknown rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.domain import errors
from common.domain.context import RequestContext
from compute_api.compute.policies import COMPUTE_RULES, RULES
from compute_api.http.policy import Policy, add_implied

STOP, LIST_HOSTS, KEYS = (
    "os_compute_api:servers:stop",
    "os_compute_api:os-services:list",
    "os_compute_api:os-keypairs:show",
)


def caller(
    *roles: str, project: str = "p", user: str = "u", system: str | None = None
) -> RequestContext:
    return RequestContext(user, project, roles, "req-1", system_scope=system)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(COMPUTE_RULES)


@pytest.mark.parametrize(
    ("roles", "rule", "target", "allowed"),
    [
        (("member",), STOP, {"project_id": "p"}, True),
        (("Member",), STOP, {"project_id": "p"}, True),
        (("manager",), STOP, {"project_id": "p"}, True),
        (("admin",), STOP, {"project_id": "q"}, True),
        (("reader",), STOP, {"project_id": "p"}, False),
        (("member",), STOP, {"project_id": "q"}, False),
        (("member",), STOP, {}, False),
        ((), STOP, {"project_id": "p"}, False),
        (("member",), LIST_HOSTS, None, False),
        (("admin",), LIST_HOSTS, None, True),
        (("reader",), KEYS, {"user_id": "u"}, True),
        (("member",), KEYS, {"user_id": "v"}, False),
        (("admin",), "os_compute_api:no:such:rule", None, False),
    ],
)
def test_default_policy_rule_allows_or_denies_by_role_and_target(
    policy: Policy, roles: tuple[str, ...], rule: str, target: dict[str, str] | None, allowed: bool
) -> None:
    assert policy.allows(rule, caller(*roles), target) is allowed


def test_add_implied_adds_all_implied_roles() -> None:
    assert add_implied(("admin",)) == ("admin", "manager", "member", "reader")
    assert add_implied(("member", "service")) == ("member", "reader", "service")
    assert add_implied(()) == ()


def test_system_scoped_token_passes_no_project_rule(policy: Policy) -> None:
    assert not policy.allows(STOP, caller("admin", system="all"), {"project_id": "p"})


def test_policy_refusal_names_the_rule(policy: Policy) -> None:
    with pytest.raises(
        errors.Forbidden,
        match="^Policy doesn't allow os_compute_api:servers:stop to be performed.$",
    ):
        policy.require(STOP, caller("reader"))


def test_policy_file_replaces_named_rules_and_keeps_other_defaults(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        f'"{STOP}": "role:operator"\n"{LIST_HOSTS}": "rule:project_reader_api"\n"compute:unknown": "@"\n'
    )
    policy = Policy(COMPUTE_RULES, str(path))
    assert policy.allows(STOP, caller("operator"))
    assert not policy.allows(STOP, caller("admin"))
    assert policy.allows(LIST_HOSTS, caller("reader"))
    assert policy.allows(KEYS, caller("reader")), (
        "rules that the file does not name keep their defaults"
    )


def test_admin_passes_all_default_policy_rules(policy: Policy) -> None:
    for rule in RULES:
        assert policy.allows(rule, caller("admin"))
