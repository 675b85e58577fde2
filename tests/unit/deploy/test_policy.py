# SPDX-License-Identifier: Apache-2.0
"""``kilonova policy``: what it prints and the status it ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compute_api.compute.policies import RULES
from compute_api.http.policy_rules import BASES
from compute_api.placement.policies import RULES as PLACEMENT
from deploy.operator.main import main

STOP = "os_compute_api:servers:stop"


class Command:
    """The command over a configuration in a folder of its own."""

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
        told = self._capsys.readouterr()
        return status, told.out, told.err


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_list_shows_every_rule_and_who_says_it(command: Command) -> None:
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


def test_explain_says_what_a_rule_is_made_of(command: Command) -> None:
    status, out, _ = command.run("policy", "explain", STOP, "--as", "Boss")
    assert status == 0
    assert out.splitlines() == [
        "guards POST /servers/{server_id}/action os-stop",
        f"{STOP}: rule:mine or rule:gone  ({command.policy}:2)",
        f"mine: role:boss  ({command.policy}:1)",
        "gone: there is no such rule",
        "a caller who is Boss may do it to",
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
def test_explain_says_whose_things(
    command: Command, rule: str, roles: list[str], may: list[bool]
) -> None:
    asked = [word for role in roles for word in ("--as", role)]
    status, out, _ = command.run("policy", "explain", rule, "--json", *asked)
    told = json.loads(out)
    assert list(told["may"].values()) == may and status == (0 if may[0] else 1)
    assert set(roles) <= set(told["roles"])


def test_explain_names_the_operations(command: Command) -> None:
    told = json.loads(
        command.run("policy", "explain", "os_compute_api:servers:show", "--as", "x", "--json")[1]
    )
    assert "GET /servers/{server_id}" in told["guards"]
    told = json.loads(
        command.run("policy", "explain", "placement:traits:list", "--as", "x", "--json")[1]
    )
    assert told["guards"] == ["GET /traits"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["os_compute_api:servers:stpo", "--as", "x"], f"did you mean {STOP}?"),
        (["os-keypairs", "--as", "x"], "did you mean os_compute_api:os-keypairs:"),
        ([STOP], "--as"),
        (["--as", "x"], "RULE"),
        (["zzz", "--as", "x"], "there is no rule zzz\n"),
    ],
)
def test_what_cannot_be_asked_is_said(command: Command, words: list[str], said: str) -> None:
    status, _, err = command.run("policy", "explain", *words)
    assert status == 2 and said in err


@pytest.mark.parametrize(
    "words",
    [["policy", "list"], ["policy", "explain", STOP, "--as", "x"], ["config", "check"]],
    ids=" ".join,
)
def test_a_broken_file_is_named(command: Command, words: list[str]) -> None:
    command.policy.write_text('\n"a": "role:x or"\n')
    status, _, err = command.run(*words)
    assert status == 1 and err.startswith(f"kilonova: [api] policy_file {command.policy}:2: ")


def test_config_check_warns_of_what_has_no_effect(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    command.policy.write_text('"os_compute_api:servers:stpo": "@"\n')
    assert command.run("config", "check", "--no-neighbours")[0] == 0
    assert f"did you mean {STOP}?" in caplog.text
