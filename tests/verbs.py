# SPDX-License-Identifier: Apache-2.0
"""Verbs and commands for tests, with arguments that each host accepts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from common.domain.command_key import CommandKey, CommandKind
from common.domain.models import (
    AttachedShare,
    AttachedVolume,
    Belongings,
    Command,
    Control,
    Flavor,
    GuestSpec,
    ImageRef,
    Interface,
)
from common.domain.verbs import VERBS, Destination, Verb, encode

#: Field of a verb -> value. The ids of the images differ.
VALUES: dict[str, Any] = {
    "admin_pass": "x",
    "back": True,
    "control": Control.ABORT,
    "cpu": {},
    "file": None,
    "guest": GuestSpec("s", 1, "n", Flavor("1", "n", 1, 1, 1), ImageRef("of the guest")),
    "has": Belongings(),
    "image": ImageRef("of the command"),
    "image_id": "made",
    "interface": Interface("p", mac="fa:16:3e:00:00:01", vif_type="bridge"),
    "into": None,
    "keep_ephemeral": False,
    "keep_files": False,
    "migration": CommandKey(CommandKind.DO, "a", "migrate", 1),
    "resized": 1,
    "runs": True,
    "secret": "x",
    "share": AttachedShare("h", "t", "NFS", "192.0.2.9:/h"),
    "shared": False,
    "source": "host:1",
    "timeout": 0,
    "to": Destination(details={}),
    "user": "root",
    "volume": AttachedVolume(
        "00000000-0000-4000-8000-000000000001",
        "/dev/vdb",
        1,
        {"driver_volume_type": "nfs", "data": {"export": "h:/x", "name": "volume"}},
    ),
}


def new_verb(name: str, **changes: Any) -> Verb:
    """Return a verb with arguments from ``VALUES``, except those in ``changes``."""
    verb = VERBS[name]
    return verb(**{field.name: (VALUES | changes)[field.name] for field in fields(verb)})


def new_command(
    verb: Verb | str,
    action: str = "a",
    step: str = "step",
    attempt: int = 1,
    server: str = "s",
    fence: int = 1,
    session: int = 1,
) -> Command:
    """Return a command. A verb's name stands for ``new_verb`` of that name."""
    return encode(
        new_verb(verb) if isinstance(verb, str) else verb,
        CommandKey(CommandKind.DO, action, step, attempt),
        server=server,
        fence=fence,
        session=session,
    )
