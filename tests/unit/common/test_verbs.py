# SPDX-License-Identifier: Apache-2.0
"""The verbs as commands: both ends read the same arguments, or name the field that is wrong."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest

from common.domain.verbs import VERBS, EnsureAbsent, EnsureStopped, UnknownVerb, decode
from common.domain.wire import from_wire, to_wire
from tests.verbs import new_command, new_verb

FIELDS = [(name, field.name) for name, verb in VERBS.items() for field in fields(verb)]


@pytest.mark.parametrize("name", sorted(VERBS))
def test_verb_crosses_the_wire_unchanged(name: str) -> None:
    command = new_command(name)
    assert decode(from_wire(type(command), to_wire(command))) == new_verb(name)


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_verb_without_a_field_is_refused_with_its_name(name: str, field: str) -> None:
    command = new_command(name)
    args = {key: value for key, value in command.args.items() if key != field}
    with pytest.raises(TypeError, match=f"'{field}'"):
        decode(replace(command, args=args))


def test_verb_with_a_mis_spelt_field_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="timout"):
        EnsureStopped(timout=60)  # type: ignore[call-arg]  # the mistake


def test_verb_of_a_later_release_is_unknown() -> None:
    with pytest.raises(UnknownVerb, match="levitate"):
        decode(replace(new_command(EnsureAbsent(keep_files=False)), verb="levitate"))


@pytest.mark.parametrize("name", sorted(VERBS))
def test_verb_fields_have_no_defaults(name: str) -> None:
    assert all(field.default is field.default_factory is MISSING for field in fields(VERBS[name]))
