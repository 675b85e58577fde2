# SPDX-License-Identifier: Apache-2.0
"""The message of a notification, from the conductor to ``common.rpc.notifier``."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.domain.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class Message:
    """A notification, in the form that oslo.messaging's notifier sends."""

    #: True for the versioned format.
    is_versioned: bool
    #: The publisher, for example "nova-compute:node7".
    publisher: str
    event: str
    payload: JsonObject
    #: True for the priority ERROR.
    is_error: bool = False
    #: The context of the request.
    context: JsonObject = field(default_factory=dict)
