# SPDX-License-Identifier: Apache-2.0
"""Parse query parameters: resources, required, member_of and in_tree.

Examples: ``resources=VCPU:2,DISK_GB:10``, ``required=A,!B``, ``required=in:A,B`` (since 1.39),
``member_of=UUID``, ``member_of=in:UUID,UUID``, ``member_of=!UUID`` and ``member_of=!in:UUID,UUID``
(since 1.32). The parsers also check the microversion from which a parameter may be repeated.
"""

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
    """A condition on names, for example traits.

    Attributes:
        required: At least one name of each set must be present.
        forbidden: No name of this set may be present.
    """

    required: tuple[Names, ...] = ()
    forbidden: Names = frozenset()


def resources(text: str) -> dict[str, int]:
    """Return the amount of each resource class in a text, for example ``VCPU:2,DISK_GB:10``.

    Raises:
        BadQuery: The text has another form, or an amount is not between 1 and ``MOST``.
    """
    form = (
        "Badly formed resources parameter. Expected resources query string parameter in form: "
        "?resources=VCPU:2,MEMORY_MB:1024."
    )
    if not text.strip():
        raise BadQuery(f"{form} Got: empty string.")
    amounts: dict[str, int] = {}
    for item in text.split(","):
        name, colon, amount = item.partition(":")
        if not colon or not name or ":" in amount:
            raise BadQuery(f"{form} Got: {item[:80]}.")
        try:
            number = int(amount)
        except ValueError as problem:
            raise BadQuery(
                f"Requested resource {name[:255]} expected positive integer amount. Got: "
                f"{amount[:80]}."
            ) from problem
        if number < 1:
            raise BadQuery(
                f"Requested resource {name[:255]} requires amount >= 1. Got: {amount[:80]}."
            )
        if number > MOST:
            raise BadQuery(
                f"Requested resource {name[:255]} requires amount <= {MOST}. Got: {amount[:80]}."
            )
        amounts[name] = number
    return amounts


def traits(values: Sequence[str], version: int, key: str = "required") -> Terms:
    """Return the condition on traits that the values of ``required`` express together.

    Before 1.39 only the last value counts.

    Args:
        values: The values of the parameter, which may be repeated.
        version: The microversion.
        key: The parameter's name, for errors.

    Raises:
        BadQuery: A value is invalid in this microversion, or a trait is forbidden and also
            required by its name alone.
    """
    required: list[Names] = []
    forbidden: set[str] = set()
    if version < ANY_TRAITS:
        values = values[-1:]
    for value in values:
        names, any_of = value, version >= ANY_TRAITS and value.startswith("in:")
        items = [item.strip() for item in names.removeprefix("in:" if any_of else "").split(",")]
        if version < ANY_TRAITS and value.startswith("in:"):
            raise BadQuery(
                "The format 'in:HW_CPU_X86_VMX,CUSTOM_MAGIC' only supported since microversion 1.39."
            )
        is_valid = all(items) and not (any_of and any(item.startswith("!") for item in items))
        if (
            not is_valid
            or (version < FORBIDDEN_TRAITS and any(item.startswith("!") for item in items))
            or "!" in items
        ):
            raise BadQuery(
                f"Invalid query string parameters: Expected '{key}' parameter value of the form: "
                f"{_describe_form(version)}. Got: {value[:300]}"
            )
        if any_of:
            required.append(frozenset(items))
            continue
        required += [frozenset((item,)) for item in items if not item.startswith("!")]
        forbidden |= {item[1:] for item in items if item.startswith("!")}
    conflicts = sorted(
        forbidden & {name for group in required if len(group) == 1 for name in group}
    )
    if conflicts:
        raise BadQuery(
            f"Conflicting required and forbidden traits found in {key}: {', '.join(conflicts)}"
        )
    return Terms(tuple(dict.fromkeys(required)), frozenset(forbidden))


def _describe_form(version: int) -> str:
    return (
        "HW_CPU_X86_VMX,CUSTOM_MAGIC"
        if version < FORBIDDEN_TRAITS
        else "HW_CPU_X86_VMX,!CUSTOM_MAGIC"
    )


def members(values: Sequence[str], version: int, key: str = "member_of") -> Terms:
    """Return the condition on aggregates that the values of ``member_of`` express together.

    Args:
        values: The values of the parameter, which may be repeated since 1.24.
        version: The microversion.
        key: The parameter's name, for errors.

    Raises:
        BadQuery: A value is invalid in this microversion, or there are several before 1.24.
    """
    if len(values) > 1 and version < MANY_MEMBER_OF:
        raise BadQuery("Multiple member_of parameters are not supported")
    required: list[Names] = []
    forbidden: set[str] = set()
    for value in values:
        is_not = value.startswith("!")
        if is_not and version < NOT_MEMBER_OF:
            raise BadQuery(
                "Forbidden member_of parameters are not supported in the specified microversion"
            )
        text = value.removeprefix("!")
        items = text.removeprefix("in:").split(",") if text.startswith("in:") else [text]
        if "," in text and not text.startswith("in:"):
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
            forbidden |= group
        else:
            required.append(group)
    return Terms(tuple(required), frozenset(forbidden))


def tree(value: str, key: str = "in_tree") -> str:
    """Return the value of ``in_tree``, the uuid of a provider, in lower case with dashes.

    Raises:
        BadQuery: The value is not a uuid.
    """
    if not ids.spells_uuid(value):
        raise BadQuery(f"Expected '{key}' parameter to be a format of uuid. Got: {value[:80]}")
    return str(uuid.UUID(value))


def refuse_unknown(kind: str, names: Sequence[str]) -> None:
    """Reject a query with unknown names.

    Args:
        kind: "trait" or "class".
        names: The unknown names.

    Raises:
        BadRequest: ``names`` is not empty.
    """
    if names and kind == "trait":
        raise errors.BadRequest(f"No such trait(s): {', '.join(names)}.")
    if names:
        raise errors.BadRequest(
            f"Invalid resource class in resources parameter: No such resource class "
            f"{', '.join(names)}."
        )
