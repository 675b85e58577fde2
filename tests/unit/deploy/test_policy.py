# SPDX-License-Identifier: Apache-2.0
"""``kilonova policy list`` and ``explain``: their output and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compute_api.compute.policies import RULES
from compute_api.http.policy_rules import BASES
from compute_api.placement.policies import RULES as PLACEMENT
from deploy.operator.main import main
from tests.log_lines import logged_fields

STOP = "os_compute_api:servers:stop"


class Command:
    """Runs ``kilonova`` with a policy file that overrides one rule and adds another."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.policy, self.conf, self._capsys = (
            folder / "policy.yaml",
            folder / "kilonova.conf",
            capsys,
        )
        self.conf.write_text(f"[api]\npolicy_file = {self.policy}\n")
        self.policy.write_text(f'"mine": "role:boss"\n"{STOP}": "rule:mine or rule:gone"\n')

    def run(self, *words: str) -> tuple[int, str, str]:
        status = main(["--config", str(self.conf), *words])
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_policy_list_shows_every_rule_and_its_source(command: Command) -> None:
    status, out, _ = command.run("policy", "list", "--json")
    rules = {row["rule"]: row for row in json.loads(out)}
    assert status == 0 and set(rules) == {*BASES, *RULES, *PLACEMENT, "mine"}
    assert rules[STOP] == {
        "rule": STOP,
        "who": "rule:mine or rule:gone",
        "from": f"{command.policy}:2",
    }
    assert rules["placement:usages"]["from"] == "default"
    _, out, _ = command.run("policy", "list")
    assert len(out.splitlines()) == len(rules) + 1
    assert [STOP, "rule:mine", "or", "rule:gone", f"{command.policy}:2"] in [
        line.split() for line in out.splitlines()
    ]


def test_policy_explain_shows_parts_of_rule_and_permissions(command: Command) -> None:
    status, out, _ = command.run("policy", "explain", STOP, "--as", "Boss")
    assert status == 0
    assert out.splitlines() == [
        "guards POST /servers/{server_id}/action os-stop",
        f"{STOP}: rule:mine or rule:gone  ({command.policy}:2)",
        f"mine: role:boss  ({command.policy}:1)",
        "gone: there is no such rule",
        "a caller with the roles Boss may do it to",
        "  what is theirs: yes",
        "  what is another user's of their project: yes",
        "  what is another project's: yes",
    ]
    assert command.run("policy", "explain", STOP, "--as", "member")[0] == 1


@pytest.mark.parametrize(
    ("rule", "roles", "may"),
    [
        ("os_compute_api:servers:start", ["member"], [True, True, False]),
        ("os_compute_api:servers:start", ["reader"], [False, False, False]),
        ("os_compute_api:servers:start", ["admin"], [True, True, True]),
        ("os_compute_api:os-keypairs:show", ["reader"], [True, False, False]),
        ("placement:usages", ["reader"], [True, True, False]),
        ("placement:usages", ["x", "service"], [True, True, True]),
    ],
)
def test_policy_explain_shows_permissions_by_role_and_owner(
    command: Command, rule: str, roles: list[str], may: list[bool]
) -> None:
    as_options = [word for role in roles for word in ("--as", role)]
    status, out, _ = command.run("policy", "explain", rule, "--json", *as_options)
    explanation = json.loads(out)
    assert list(explanation["may"].values()) == may and status == (0 if may[0] else 1)
    assert set(roles) <= set(explanation["roles"])


def test_policy_explain_names_guarded_operations(command: Command) -> None:
    explanation = json.loads(
        command.run("policy", "explain", "os_compute_api:servers:show", "--as", "x", "--json")[1]
    )
    assert "GET /servers/{server_id}" in explanation["guards"]
    explanation = json.loads(
        command.run("policy", "explain", "placement:traits:list", "--as", "x", "--json")[1]
    )
    assert explanation["guards"] == ["GET /traits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["os_compute_api:servers:stpo", "--as", "x"], f"did you mean {STOP}?"),
        (["os-keypairs", "--as", "x"], "did you mean os_compute_api:os-keypairs:"),
        ([STOP], "--as"),
        (["--as", "x"], "RULE"),
        (["zzz", "--as", "x"], "there is no policy rule zzz\n"),
    ],
)
def test_policy_explain_with_wrong_arguments_exits_with_2_and_hint(
    command: Command, words: list[str], said: str
) -> None:
    status, _, err = command.run("policy", "explain", *words)
    assert status == 2 and said in err


@pytest.mark.parametrize(
    "words",
    [["policy", "list"], ["policy", "explain", STOP, "--as", "x"], ["config", "check"]],
    ids=" ".join,
)
def test_policy_commands_and_config_check_name_line_of_broken_policy_file(
    command: Command, words: list[str]
) -> None:
    command.policy.write_text('\n"a": "role:x or"\n')
    status, _, err = command.run(*words)
    assert status == 1 and err.startswith(f"kilonova: [api] policy_file {command.policy}:2: ")


def test_config_check_warns_of_unknown_rule_in_policy_file(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    command.policy.write_text('"os_compute_api:servers:stpo": "@"\n')
    assert command.run("config", "check", "--no-external-services")[0] == 0
    [fields] = logged_fields(caplog, "a rule of the policy file needs attention")
    assert f"did you mean {STOP}?" in str(fields["problem"])
