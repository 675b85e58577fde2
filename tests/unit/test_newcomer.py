# SPDX-License-Identifier: Apache-2.0
"""The forms of the ring newcomer: commands, environment and place of each visit."""

from __future__ import annotations

import pytest

from tests.newcomer import forms
from tests.newcomer.forms import (
    EXPLANATIONS,
    Form,
    Visit,
    find_archive_only,
    plan_visit,
    read_names,
)


def logs(planned_visit: Visit) -> list[str]:
    return [command.log for command in planned_visit.commands]


def test_newcomer_visit_without_forms_is_a_clone_with_terminal() -> None:
    plain = plan_visit([])
    assert plain.has_git and plain.has_terminal and plain.umask == 0o022
    assert plain.folder.startswith("/root/") and " " not in plain.folder
    assert plain.environment["LANG"] == "C.UTF-8"
    assert [command.words for command in plain.commands] == [
        ("./deploy/up",),
        ("./deploy/down",),
        ("./deploy/test",),
    ]
    assert plain == plan_visit(["clone"])


def test_newcomer_visit_with_combined_forms_has_effects_of_each_form() -> None:
    combined = plan_visit(["archive", "space", "umask", "bare"])
    assert not combined.has_git and not combined.has_terminal and combined.umask == 0o077
    assert combined.folder.startswith("/root/") and " " in combined.folder
    assert set(combined.environment) == {"PATH", "HOME"}
    assert combined.name == "archive-space-umask-bare"


def test_newcomer_visit_in_form_beside_keeps_cloud_running_during_tests() -> None:
    assert logs(plan_visit(["beside"])) == ["up", "test"]


def test_newcomer_visit_in_form_twice_repeats_each_command_except_down() -> None:
    assert logs(plan_visit(["twice"])) == ["up", "up-again", "down", "test", "test-again"]
    assert logs(plan_visit(["twice", "beside"])) == ["up", "up-again", "test", "test-again"]


def test_newcomer_visit_passes_arguments_to_inner_test_command() -> None:
    [*_, last] = plan_visit(["archive"], ["unit", "--", "-k", "x"]).commands
    assert last.words == ("./deploy/test", "unit", "--", "-k", "x")


@pytest.mark.parametrize("words", [["clone", "archive"], ["naked"], ["archive", "Bare"]])
def test_newcomer_visit_refuses_contradicting_and_unknown_forms(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"not both|not forms"):
        plan_visit(words)


def test_newcomer_visit_forms_have_an_explanation() -> None:
    assert set(EXPLANATIONS) == set(Form)


def test_tests_skipped_only_in_an_archive_are_found_unless_listed() -> None:
    clone = read_names(["a::x\tno KVM"])
    archive = read_names(["a::x\tno KVM", "b::y\tno git", "c::z\tno git"])
    allowed = read_names(["# test, tab, reason", "", "c::z\treads the history"])
    assert find_archive_only(archive, clone, allowed) == ["b::y"]


def test_list_of_tests_only_in_a_clone_is_short_and_has_reasons() -> None:
    lines = forms.ALLOWED.read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert len(entries) <= 10
    assert all(len(line.split("\t")) == 2 for line in entries)
