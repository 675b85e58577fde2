# SPDX-License-Identifier: Apache-2.0
"""Parsers of query parameters: resources, required, member_of. Pure.

``resources=VCPU:2,DISK_GB:10``; ``required=A,!B`` and, since 1.39, ``required=in:A,B``;
``member_of=UUID``, ``in:UUID,UUID`` and, since 1.32, ``!UUID`` and ``!in:…``. They also know since
when a parameter may be repeated."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from common.domain import errors, ids
from compute_api.placement.request import BadQuery

FORBIDDEN_TRAITS, MANY_MEMBER_OF, NOT_MEMBER_OF, ANY_TRAITS = 22, 24, 32, 39
MOST = 2**31 - 1
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Terms:
    """What must hold (one of each set) and what must not."""

    wanted: tuple[Names, ...] = ()
    unwanted: Names = frozenset()


def resources(text: str) -> dict[str, int]:
    """VCPU:2,DISK_GB:10. Raises BadRequest."""
    form = (
        "Badly formed resources parameter. Expected resources query string parameter in form: "
        "?resources=VCPU:2,MEMORY_MB:1024."
    )
    if not text.strip():
        raise BadQuery(f"{form} Got: empty string.")
    found: dict[str, int] = {}
    for item in text.split(","):
        name, colon, amount = item.partition(":")
        if not colon or not name or ":" in amount:
            raise BadQuery(f"{form} Got: {item[:80]}.")
        try:
            number = int(amount[:12])
        except ValueError as problem:
            raise BadQuery(
                f"Requested resource {name[:255]} expected positive integer amount. Got: "
                f"{amount[:80]}."
            ) from problem
        if number < 1:
            raise BadQuery(f"Requested resource {name[:255]} requires amount >= 1. Got: {number}.")
        if number > MOST:
            raise BadQuery(
                f"Requested resource {name[:255]} requires amount <= {MOST}. Got: {number}."
            )
        found[name] = number
    return found


def traits(values: Sequence[str], version: int, key: str = "required") -> Terms:
    """Of several values all must hold. Raises BadRequest."""
    wanted: list[Names] = []
    unwanted: set[str] = set()
    if version < ANY_TRAITS:  # of several the last counts
        values = values[-1:]
    for value in values:
        names, any_of = value, version >= ANY_TRAITS and value.startswith("in:")
        items = [item.strip() for item in names.removeprefix("in:" if any_of else "").split(",")]
        if version < ANY_TRAITS and value.startswith("in:"):
            raise BadQuery(
                "The format 'in:HW_CPU_X86_VMX,CUSTOM_MAGIC' only supported since microversion 1.39."
            )
        ok = all(items) and not (any_of and any(item.startswith("!") for item in items))
        if (
            not ok
            or (version < FORBIDDEN_TRAITS and any(item.startswith("!") for item in items))
            or "!" in items
        ):
            raise BadQuery(
                f"Invalid query string parameters: Expected '{key}' parameter value of the form: "
                f"{_form(version)}. Got: {value[:300]}"
            )
        if any_of:
            wanted.append(frozenset(items))
            continue
        wanted += [frozenset((item,)) for item in items if not item.startswith("!")]
        unwanted |= {item[1:] for item in items if item.startswith("!")}
    clash = sorted(unwanted & {name for group in wanted if len(group) == 1 for name in group})
    if clash:
        raise BadQuery(
            f"Conflicting required and forbidden traits found in {key}: {', '.join(clash)}"
        )
    return Terms(tuple(dict.fromkeys(wanted)), frozenset(unwanted))


def _form(version: int) -> str:
    return (
        "HW_CPU_X86_VMX,CUSTOM_MAGIC"
        if version < FORBIDDEN_TRAITS
        else "HW_CPU_X86_VMX,!CUSTOM_MAGIC"
    )


def members(values: Sequence[str], version: int, key: str = "member_of") -> Terms:
    """Of several values all must hold. Raises BadRequest."""
    if len(values) > 1 and version < MANY_MEMBER_OF:
        raise BadQuery("Multiple member_of parameters are not supported")
    wanted: list[Names] = []
    unwanted: set[str] = set()
    for value in values:
        is_not = value.startswith("!")
        if is_not and version < NOT_MEMBER_OF:
            raise BadQuery(
                "Forbidden member_of parameters are not supported in the specified microversion"
            )
        listed = value.removeprefix("!")
        items = listed.removeprefix("in:").split(",") if listed.startswith("in:") else [listed]
        if "," in listed and not listed.startswith("in:"):
            raise BadQuery(
                f"Multiple values for '{key}' must be prefixed with the 'in:' or '!in:' keyword using the "
                "valid microversion."
            )
        if not all(ids.spells_uuid(item) for item in items):
            raise BadQuery(
                f"Invalid query string parameters: Expected '{key}' parameter to contain valid UUID(s). "
                f"Got: {value[:300]}"
            )
        group = frozenset(str(uuid.UUID(item)) for item in items)
        if is_not:
            unwanted |= group
        else:
            wanted.append(group)
    return Terms(tuple(wanted), frozenset(unwanted))


def tree(value: str, key: str = "in_tree") -> str:
    """A provider's uuid. Raises BadRequest."""
    if not ids.spells_uuid(value):
        raise BadQuery(f"Expected '{key}' parameter to be a format of uuid. Got: {value[:80]}")
    return str(uuid.UUID(value))


def refuse_unknown(kind: str, names: Sequence[str]) -> None:
    """Raises BadRequest for names that nothing has; kind: "trait" or "class"."""
    if names and kind == "trait":
        raise errors.BadRequest(f"No such trait(s): {', '.join(names)}.")
    if names:
        raise errors.BadRequest(
            f"Invalid resource class in resources parameter: No such resource class "
            f"{', '.join(names)}."
        )
