# SPDX-License-Identifier: Apache-2.0
"""A call to a neighbour for several actions, ports or images, of which one refusal keeps no other from being made."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from common import errors

T = TypeVar("T")


def one_by_one(neighbour: str, call: Callable[[T], None], members: Sequence[T]) -> list[Exception | None]:
    """Make each call to this neighbour; what each raised, or None. The service makes several at a time."""
    raised: list[Exception | None] = []
    for member in members:
        try:
            call(member)
            raised.append(None)
        except Exception as problem:  # noqa: BLE001  # it is handed to the caller, who tells one kind from the other
            raised.append(problem)
    return raised


def try_all(call: Callable[[T], None], members: Iterable[T]) -> None:
    """Make the call for each, also after a refusal.

    Raises:
        Unavailable: at once. Problem: the first refusal, when all were tried.
    """
    refused: errors.Problem | None = None
    for member in members:
        try:
            call(member)
        except errors.Unavailable:
            raise
        except errors.Problem as problem:
            refused = refused or problem
    if refused is not None:
        raise refused
