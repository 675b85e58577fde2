# SPDX-License-Identifier: Apache-2.0
"""Policy decisions: the default rules, implied roles, an operator's file, and unknown rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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


TARGETS = ({}, *({"project_id": p, "user_id": u} for p in ("p", "q", None) for u in ("u", "v")))
CALLERS = (
    *(caller(*roles, project=p) for roles in ((), ("reader",), ("admin",)) for p in ("p", "q")),
    caller("member", user="v"),
    caller("admin", system="all"),
    replace(caller("member"), domain_id="d"),
    replace(caller("member"), user_domain_id="d"),
)


@pytest.mark.parametrize(
    "check",
    [
        "",
        "!",
        "role:reader and project_id:%(project_id)s",
        "not user_id:%(user_id)s",
        "project_id:%(user_id)s or user_domain_id:d",
        "is_admin:True or user_id:u",
        "rule:project_member_or_admin",
        "rule:not_there",
        "role:%(project_id)s",
        "'p':%(project_id)s",
        "service_roles:s",
    ],
)
def test_kept_policy_decision_equals_evaluated_decision(tmp_path: Path, check: str) -> None:
    """For example, the decision for a caller of one project is not used for another target."""
    path = tmp_path / "policy.yaml"
    path.write_text(f'"{STOP}": "{check}"\n')
    kept = Policy(COMPUTE_RULES, str(path))
    for _ in range(2):
        for of_caller in CALLERS:
            for target in TARGETS:
                expected = kept.evaluate(STOP, of_caller, target)
                assert kept.allows(STOP, of_caller, target) is expected, (of_caller, target)


def test_policy_evaluates_rule_once_for_equal_facts_of_many_projects(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = []
    evaluate = policy.evaluate

    def count(rule: str, context: RequestContext, target: Mapping[str, object]) -> bool:
        evaluations.append(rule)
        return evaluate(rule, context, target)

    monkeypatch.setattr(policy, "evaluate", count)
    for number in range(100):
        project = f"project-{number}"
        for _ in range(2):
            of_project = caller("operator", "member", project=project, user=f"user-{number}")
            assert policy.allows(STOP, of_project, {"project_id": project})
            assert not policy.allows(STOP, of_project, {"project_id": "other"})
    assert len(evaluations) == 2
