# SPDX-License-Identifier: Apache-2.0
"""Conversion of the records in ``common.domain.models`` to wire data and back."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from common.domain import context, models
from common.domain.models import (
    Control,
    FailureReason,
    Flavor,
    GuestSpec,
    ImageRef,
    Result,
    Sync,
    SyncAnswer,
)
from common.domain.verbs import EnsureGuest
from common.domain.wire import from_wire, to_wire
from tests.verbs import new_command


@pytest.mark.parametrize("data", [[], ["numa_nodes"], "numa_nodes", 7, None])
def test_from_wire_refuses_data_other_than_an_object(data: Any) -> None:
    with pytest.raises(TypeError):
        from_wire(models.HardwareAssignment, data)


RECORDS = [kind for kind in vars(models).values() if dataclasses.is_dataclass(kind)]
JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(max_size=5),
    lambda inner: (
        strategies.lists(inner, max_size=2)
        | strategies.dictionaries(strategies.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


def values_of(hint: Any) -> strategies.SearchStrategy[Any]:
    """Return a strategy for values of a field of this type."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return strategies.one_of(
            [strategies.none() if part is types.NoneType else values_of(part) for part in arguments]
        )
    if typing.get_origin(hint) is list:
        return strategies.lists(values_of(arguments[0]), max_size=2)
    if typing.get_origin(hint) is dict:
        return strategies.dictionaries(
            strategies.text(max_size=5), values_of(arguments[1]), max_size=2
        )
    if dataclasses.is_dataclass(hint):
        return strategies.builds(
            hint, **{name: values_of(kind) for name, kind in typing.get_type_hints(hint).items()}
        )
    if hint is float:
        # NaN is not equal to itself.
        return strategies.floats(allow_nan=False)
    return JSON if hint is Any else strategies.from_type(hint)


def test_records_found_in_models_include_records_of_protocol() -> None:
    assert {kind.__name__ for kind in RECORDS} >= {
        "Flavor",
        "ImageRef",
        "GuestSpec",
        "DomainState",
        "HostInventory",
        "Command",
        "Result",
        "Sync",
        "SyncAnswer",
        "Access",
        "RequestSpec",
        "Selection",
    }


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=strategies.data())
def test_record_read_back_from_json_is_unchanged(
    kind: type[Any], data: strategies.DataObject
) -> None:
    record = data.draw(values_of(kind))
    assert from_wire(kind, json.loads(json.dumps(to_wire(record)))) == record


def minimal_data(kind: type[Any]) -> dict[str, Any]:
    """Return wire data that has only the fields without a default."""

    def value(hint: Any) -> Any:
        if dataclasses.is_dataclass(hint):
            return minimal_data(typing.cast(type, hint))
        return next(iter(hint)) if isinstance(hint, type(Control)) else None

    hints = typing.get_type_hints(kind)
    return {
        field.name: value(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory
    }


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_from_wire_ignores_unknown_fields(kind: type[Any]) -> None:
    record = from_wire(kind, {**minimal_data(kind), "added_in_a_later_version": {"x": 1}})
    assert not hasattr(record, "added_in_a_later_version")


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_from_wire_uses_defaults_for_missing_fields(kind: type[Any]) -> None:
    record = from_wire(kind, minimal_data(kind))
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            assert getattr(record, field.name) == field.default
        elif field.default_factory is not dataclasses.MISSING:
            assert getattr(record, field.name) == field.default_factory()


def test_from_wire_without_required_field_names_the_field() -> None:
    with pytest.raises(TypeError, match="vcpus"):
        from_wire(Flavor, {"id": "1", "name": "n", "memory_mb": 1, "root_gb": 1})


def test_from_wire_restores_nested_records() -> None:
    flavor = Flavor("1", "n", 1, 2, 3, extra_specs={"hw:x": "y"})
    spec = GuestSpec("s", 1, "n", flavor, ImageRef("i"), instance={"keys": [{"name": "k"}]})
    assert from_wire(GuestSpec, to_wire(spec)) == spec
    assert from_wire(GuestSpec, to_wire(GuestSpec("s", 1, "n", flavor))).image is None
    answer = SyncAnswer(1, ["k"], [new_command(EnsureGuest(guest=spec))], {"x": 1})
    assert from_wire(SyncAnswer, to_wire(answer)) == answer
    sync = Sync("h", 1, domains=[], results=[Result("k", "s", 1, "done")])
    assert from_wire(Sync, to_wire(sync)).domains == []
    assert from_wire(Sync, to_wire(Sync("h", 1))).domains is None


def test_to_wire_refuses_objects_sets_bytes_and_classes() -> None:
    for thing in (object(), {1, 2}, b"bytes", Flavor):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            to_wire({"deep": [thing]})


@pytest.mark.parametrize(("swap", "disk"), [(0, 30), (1, 31), (1024, 31), (1025, 32)])
def test_flavor_disk_gb_sums_root_ephemeral_and_swap_rounded_up(swap: int, disk: int) -> None:
    assert Flavor("1", "n", 1, 1, root_gb=20, ephemeral_gb=10, swap_mb=swap).disk_gb == disk


def test_access_and_context_repr_hide_tokens() -> None:
    access = models.Access("http://image", "SECRET")
    caller = context.RequestContext("u", "p", ("member",), "req-1", token="SECRET")
    for text in (repr(access), str(access), repr(caller), f"{caller}", repr([access, caller])):
        assert "SECRET" not in text
    assert from_wire(models.Access, to_wire(access)).token == "SECRET"


def test_request_context_is_admin_only_with_the_admin_role() -> None:
    assert context.RequestContext("u", "p", ("member", "admin"), "r").is_admin
    assert not context.RequestContext("u", "p", ("administrator", "member"), "r").is_admin


def test_command_result_with_unknown_reason_is_read_as_unspecified() -> None:
    sent = to_wire(Result("k", "s", 1, "failed", reason=FailureReason.ABORTED))
    assert from_wire(Result, sent).reason is FailureReason.ABORTED
    assert (
        from_wire(Result, sent | {"reason": "of a later release"}).reason
        is FailureReason.UNSPECIFIED
    )
    assert from_wire(
        Result, {name: value for name, value in sent.items() if name != "reason"}
    ) == Result("k", "s", 1, "failed")
