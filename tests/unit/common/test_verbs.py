# SPDX-License-Identifier: Apache-2.0
"""Verbs encoded as commands: decoding, and errors for missing, misspelt and unknown fields."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

import pytest

from common.domain.verbs import VERBS, EnsureAbsent, EnsureStopped, UnknownVerb, decode
from common.domain.wire import from_wire, to_wire
from tests.verbs import new_command, new_verb

FIELDS = [(name, field.name) for name, verb in VERBS.items() for field in fields(verb)]


@pytest.mark.parametrize("name", sorted(VERBS))
def test_verb_decoded_from_its_command_is_unchanged(name: str) -> None:
    command = new_command(name)
    assert decode(from_wire(type(command), to_wire(command))) == new_verb(name)


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_verb_decode_without_a_field_names_the_field(name: str, field: str) -> None:
    command = new_command(name)
    args = {key: value for key, value in command.args.items() if key != field}
    with pytest.raises(TypeError, match=f"'{field}'"):
        decode(replace(command, args=args))


def test_verb_with_misspelt_field_raises_type_error() -> None:
    with pytest.raises(TypeError, match="timout"):
        EnsureStopped(timout=60)  # type: ignore[call-arg]  # The test needs this mistake.


def test_verb_decode_of_unknown_name_raises_unknown_verb() -> None:
    with pytest.raises(UnknownVerb, match="levitate"):
        decode(replace(new_command(EnsureAbsent(keep_files=False)), verb="levitate"))


@pytest.mark.parametrize("name", sorted(VERBS))
def test_verb_fields_have_no_defaults(name: str) -> None:
    assert all(field.default is field.default_factory is MISSING for field in fields(VERBS[name]))
