# SPDX-License-Identifier: Apache-2.0
"""Records over the wire: every record of common.domain.models comes back as it was, whatever it
holds."""

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
def test_record_is_not_read_from_what_is_no_object(data: Any) -> None:
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


def of(hint: Any) -> strategies.SearchStrategy[Any]:
    """Values of a field of this type."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return strategies.one_of(
            [strategies.none() if part is types.NoneType else of(part) for part in arguments]
        )
    if typing.get_origin(hint) is list:
        return strategies.lists(of(arguments[0]), max_size=2)
    if typing.get_origin(hint) is dict:
        return strategies.dictionaries(strategies.text(max_size=5), of(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        return strategies.builds(
            hint, **{name: of(kind) for name, kind in typing.get_type_hints(hint).items()}
        )
    if hint is float:
        return strategies.floats(allow_nan=False)  # which is not equal to itself
    return JSON if hint is Any else strategies.from_type(hint)


def test_every_record_is_tried() -> None:
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
def test_each_record_survives_json(kind: type[Any], data: strategies.DataObject) -> None:
    record = data.draw(of(kind))
    assert from_wire(kind, json.loads(json.dumps(to_wire(record)))) == record


def least(kind: type[Any]) -> dict[str, Any]:
    """Only the fields without a default."""

    def value(hint: Any) -> Any:
        if dataclasses.is_dataclass(hint):
            return least(typing.cast(type, hint))
        return next(iter(hint)) if isinstance(hint, type(Control)) else None

    hints = typing.get_type_hints(kind)
    return {
        field.name: value(hints[field.name])
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory
    }


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_an_older_reader_ignores_what_a_newer_sender_added(kind: type[Any]) -> None:
    record = from_wire(kind, {**least(kind), "added_in_a_later_version": {"x": 1}})
    assert not hasattr(record, "added_in_a_later_version")


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_what_an_older_sender_does_not_know_takes_its_default(kind: type[Any]) -> None:
    record = from_wire(kind, least(kind))
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            assert getattr(record, field.name) == field.default
        elif field.default_factory is not dataclasses.MISSING:
            assert getattr(record, field.name) == field.default_factory()


def test_a_missing_field_without_a_default_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="vcpus"):
        from_wire(Flavor, {"id": "1", "name": "n", "memory_mb": 1, "root_gb": 1})


def test_records_inside_records_and_lists_become_records() -> None:
    flavor = Flavor("1", "n", 1, 2, 3, extra_specs={"hw:x": "y"})
    spec = GuestSpec("s", 1, "n", flavor, ImageRef("i"), instance={"keys": [{"name": "k"}]})
    assert from_wire(GuestSpec, to_wire(spec)) == spec
    assert from_wire(GuestSpec, to_wire(GuestSpec("s", 1, "n", flavor))).image is None
    answer = SyncAnswer(1, ["k"], [new_command(EnsureGuest(guest=spec))], {"x": 1})
    assert from_wire(SyncAnswer, to_wire(answer)) == answer
    sync = Sync("h", 1, domains=[], results=[Result("k", "s", 1, "done")])
    assert from_wire(Sync, to_wire(sync)).domains == []
    assert from_wire(Sync, to_wire(Sync("h", 1))).domains is None


def test_what_is_no_record_does_not_cross_a_process_border() -> None:
    for thing in (object(), {1, 2}, b"bytes", Flavor):
        with pytest.raises(TypeError, match="does not cross a process border"):
            to_wire({"deep": [thing]})


@pytest.mark.parametrize(("swap", "disk"), [(0, 30), (1, 31), (1024, 31), (1025, 32)])
def test_a_flavor_takes_the_disk_of_all_its_parts_rounded_up(swap: int, disk: int) -> None:
    assert Flavor("1", "n", 1, 1, root_gb=20, ephemeral_gb=10, swap_mb=swap).disk_gb == disk


def test_tokens_never_print() -> None:
    access = models.Access("http://image", "SECRET")
    caller = context.RequestContext("u", "p", ("member",), "req-1", token="SECRET")
    for shown in (repr(access), str(access), repr(caller), f"{caller}", repr([access, caller])):
        assert "SECRET" not in shown
    assert from_wire(models.Access, to_wire(access)).token == "SECRET"


def test_admin_is_a_role() -> None:
    assert context.RequestContext("u", "p", ("member", "admin"), "r").is_admin
    assert not context.RequestContext("u", "p", ("administrator", "member"), "r").is_admin


def test_result_reason_of_a_later_release_is_unspecified() -> None:
    sent = to_wire(Result("k", "s", 1, "failed", reason=FailureReason.ABORTED))
    assert from_wire(Result, sent).reason is FailureReason.ABORTED
    assert (
        from_wire(Result, sent | {"reason": "of a later release"}).reason
        is FailureReason.UNSPECIFIED
    )
    assert from_wire(
        Result, {name: value for name, value in sent.items() if name != "reason"}
    ) == Result("k", "s", 1, "failed")
