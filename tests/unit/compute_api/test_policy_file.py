# SPDX-License-Identifier: Apache-2.0
"""An operator's policy file: rules in force, warnings, and errors with their line."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import oslo_policy.policy
import pytest

from common.domain import errors
from common.domain.context import RequestContext
from common.domain.errors import ConfigError
from compute_api.compute.policies import COMPUTE_RULES, FORMER, NOT_HERE, RULES
from compute_api.http.policy import Policy
from compute_api.http.policy_rules import BASES
from tests.log_lines import logged_fields

STOP, START = "os_compute_api:servers:stop", "os_compute_api:servers:start"
HOSTS = "os_compute_api:os-services:list"


def caller(*roles: str, **more: object) -> RequestContext:
    return RequestContext("u", "p", roles, "req-1", **more)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def load_policy(path: Path, text: str) -> Policy:
    path.write_text(text)
    return Policy(COMPUTE_RULES, str(path))


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('"a": "@"\n"b": "role:x\n', 3, "this is no YAML"),
        ('a: "@"\n\tb: "@"\n', 2, "this is no YAML"),
        ("\n- a\n- b\n", 2, "write rules as"),
        ("# only\nword\n", 2, "write rules as"),
        (f'\n"{STOP}": "role:member or"\n', 2, "cannot be parsed"),
        (f'"{STOP}": "(role:member"\n', 1, "cannot be parsed"),
        (f'"{STOP}": "member"\n', 1, "cannot be parsed"),
        (f'"{STOP}": "role:a role:b"\n', 1, "cannot be parsed"),
        (f'"{STOP}": ["role:a", "member"]\n', 1, "cannot be parsed"),
        (f'"{STOP}": [[["role:a"]]]\n', 1, "must contain checks and no further lists"),
        (f'"{STOP}": "project_id:%(project_id)"\n', 1, "cannot be parsed"),
        (f'"{STOP}": "project_id:%(project_id)d"\n', 1, "cannot be evaluated"),
        (f'"{STOP}": "http://host/%(name)"\n', 1, "cannot be parsed"),
        (f'"{STOP}": "user_id.name:x"\n', 1, "cannot be evaluated"),
        (f'"{STOP}": "a[:x"\n', 1, "cannot be evaluated"),
        (f'"{STOP}": !\n', 1, "a text in quotes"),
        (f'"{STOP}": |\n', 1, "a text in quotes"),
        (f'"{STOP}":\n', 1, "a text in quotes"),
        (f'"{STOP}": true\n', 1, "a text in quotes"),
        (f'"{STOP}": {{"a": "b"}}\n', 1, "a text in quotes"),
        (f'"{STOP}": "@"\n\n"{STOP}": "!"\n', 3, f"{STOP} is in line 1 already"),
        ("? [a]\n: '@'\n", 1, "a text"),
        (
            f'"{STOP}": "@"\n"mine": "rule:{START}"\n"{START}": "rule:mine"\n',
            2,
            "refer to each other",
        ),
        ('"context_is_admin": "is_admin:True"\n', 1, "refer to each other"),
        ('"a": "\x01"\n', 1, "this is no YAML"),
    ],
)
def test_invalid_policy_file_raises_config_error_with_line(
    path: Path, text: str, line: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_policy(path, text)
    assert str(refusal.value).startswith(f"{path}:{line}: ") and reason in str(refusal.value)
    assert "\n" not in str(refusal.value) and caplog.records == []


def test_missing_or_binary_policy_file_raises_config_error(path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{path}: No such file"):
        Policy(COMPUTE_RULES, str(path))
    path.write_bytes(b'"a": "@"\n\xff\n')
    with pytest.raises(ConfigError, match=f"^{path}:2: this is no UTF-8"):
        Policy(COMPUTE_RULES, str(path))


@pytest.mark.parametrize(
    ("check", "roles", "allowed"),
    [
        ('""', (), True),
        ('"@"', (), True),
        ('"!"', ("admin",), False),
        ("[]", (), True),
        ('"role:a and not role:b"', ("a",), True),
        ('"role:a and not role:b"', ("a", "b"), False),
        ('["role:a", ["role:b", "role:c"]]', ("b", "c"), True),
        ('["role:a", ["role:b", "role:c"]]', ("b",), False),
        ('"(role:a or role:b) and project_id:%(project_id)s"', ("b",), True),
        ('"rule:mine"', ("m",), True),
        ('"rule:not_there"', ("admin",), False),
        ('"True:%(no.such)s"', ("admin",), False),
        ('"is_admin:True"', ("admin",), True),
        ('"is_admin:False"', ("admin",), False),
        ('"is_admin:False"', (), True),
        ('"user_domain_id:d"', (), True),
        ('"project_domain_id:d"', (), False),
        ('"service_roles:s"', (), True),
    ],
)
def test_policy_file_check_allows_or_denies_by_oslo_policy_syntax(
    path: Path, check: str, roles: tuple[str, ...], allowed: bool
) -> None:
    loaded = load_policy(path, f'"mine": "role:m"\n"{STOP}": {check}\n')
    assert loaded.allows(STOP, caller(*roles, user_domain_id="d", service_roles=("s",))) is allowed


def test_policy_file_evaluates_check_class_registered_by_other_package(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Even(oslo_policy.policy.Check):
        def __call__(self, target: object, creds: object, enforcer: object) -> bool:  # type: ignore[override]
            return int(self.match) % 2 == 0

    monkeypatch.setitem(oslo_policy._checks.registered_checks, "even", Even)
    for check, allowed in (
        ("even:2 and role:a", True),
        ("not even:2 or even:1", False),
        ("rule:admin_api", True),
        ("role:a and rule:admin_api", True),
    ):
        loaded = load_policy(path, f'"{STOP}": "{check}"\n"admin_api": "even:2"\n')
        assert loaded.allows(STOP, caller("a")) is allowed, check


def test_policy_file_can_redefine_context_is_admin(path: Path) -> None:
    loaded = load_policy(path, '"context_is_admin": "role:boss"\n"' + STOP + '": "is_admin:True"\n')
    for rule in (STOP, HOSTS, "admin_api", "context_is_admin"):
        assert loaded.allows(rule, caller("boss")) and not loaded.allows(rule, caller("admin"))


def test_empty_policy_file_keeps_all_defaults(path: Path) -> None:
    loaded, default = load_policy(path, "# nothing yet\n"), Policy(COMPUTE_RULES)
    assert loaded.in_force == default.in_force
    assert {rule.origin for rule in loaded.in_force.values()} == {"default"}


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            '\n"os_compute_api:servers:stopp": "@"\n',
            f"2: os_compute_api:servers:stopp has no effect: there is no such "
            f"rule; did you mean {STOP}?",
        ),
        (
            '"compute:unlike_any": "@"\n',
            "1: compute:unlike_any has no effect: there is no such rule",
        ),
        (
            '"compute:servers:resize:cross_cell": "@"\n',
            "1: compute:servers:resize:cross_cell has no effect: this cloud has no such operation",
        ),
        (
            f'"{STOP}": "rule:project_memberapi"\n',
            f"1: {STOP}: there is no rule project_memberapi, so this part never permits; "
            "did you mean project_member_api?",
        ),
        (
            '"os_compute_api:os-multinic": "role:x"\n',
            "1: os_compute_api:os-multinic is a former name; now: "
            "os_compute_api:os-multinic:add, os_compute_api:os-multinic:remove",
        ),
        (
            '"os_compute_api:os-used-limits": "rule:admin_api"\n',
            "1: os_compute_api:os-used-limits is a former name and "
            "has no effect; now: os_compute_api:limits:other_project",
        ),
        ('"mine": "role:m"\n"' + STOP + '": "rule:mine"\n', None),
        (f'"{STOP}": "role:x"\n', None),
    ],
)
def test_policy_file_unknown_or_former_rule_name_is_logged_with_line(
    path: Path, text: str, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    load_policy(path, text)
    assert logged_fields(caplog, "a rule of the policy file needs attention") == (
        [{"problem": f"{path}:{warning}"}] if warning else []
    )
    assert len(caplog.records) == (1 if warning else 0)


def test_former_policy_names_apply_to_new_rules(path: Path) -> None:
    loaded = load_policy(
        path,
        '"os_compute_api:os-multinic": "role:x"\n"os_compute_api:os-multinic:add": "role:y"\n'
        '"os_compute_api:os-rescue": "role:z"\n"os_compute_api:os-hosts": "rule:admin_api"\n',
    )
    assert loaded.in_force["os_compute_api:os-multinic:add"].check == "role:y"
    assert loaded.in_force["os_compute_api:os-multinic:remove"].check == "role:x"
    assert loaded.in_force["os_compute_api:os-unrescue"].origin == f"{path}:3"
    assert loaded.in_force["os_compute_api:os-hosts:list"].origin == "default", (
        "it is what it was by default then"
    )


def test_former_policy_names_refer_to_existing_rules() -> None:
    assert {name for _, names in FORMER.values() for name in names} <= {*RULES, *NOT_HERE}
    assert NOT_HERE.isdisjoint(RULES), "what is there is no longer missing"
    assert set(FORMER).isdisjoint(BASES)


def test_changed_policy_file_is_read_again(path: Path) -> None:
    loaded = load_policy(path, f'"{STOP}": "role:x"\n')
    assert loaded.allows(STOP, caller("x"))
    path.write_text(f'"{STOP}": "role:longer"\n')
    assert loaded.allows(STOP, caller("longer")) and not loaded.allows(STOP, caller("x"))
    path.write_text("")
    assert loaded.allows(STOP, caller("member")), (
        "without a word of the operator's the default holds again"
    )


@pytest.mark.parametrize("broken", ['"x', f'"{STOP}": "role:member or"\n', f'"{STOP}":\n', None])
def test_policy_keeps_rules_and_logs_once_when_file_is_invalid_or_deleted(
    path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_policy(path, f'"{STOP}": "role:x"\n')
    new_file = path.with_name("aside")
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(3):
        assert loaded.allows(STOP, caller("x")) and not loaded.allows(STOP, caller("member"))
        assert loaded.allows(START, caller("member"))
    [record] = caplog.records
    [fields] = logged_fields(caplog, record.getMessage())
    assert record.levelno == logging.ERROR and str(path) in str(fields["problem"])
    new_file.write_text(f'"{STOP}": "role:mended"\n')
    os.replace(new_file, path)
    assert loaded.allows(STOP, caller("mended"))


def test_system_or_domain_token_passes_no_project_rule_of_file(path: Path) -> None:
    loaded = load_policy(path, f'"{STOP}": "@"\n')
    assert loaded.allows(STOP, caller()) and not loaded.allows(
        STOP, caller("admin", system_scope="all")
    )
    with pytest.raises(errors.Forbidden):
        loaded.require(STOP, caller(domain_id="d"))
