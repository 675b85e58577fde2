# SPDX-License-Identifier: Apache-2.0
"""The guest of a server as its host needs it: made from the server's row, whenever a command is sent."""
from __future__ import annotations

from typing import Any

from common.models import Flavor, GuestSpec, ImageRef
from common.wire import from_wire
from conductor.saga import Engine, Run


def spec(engine: Engine, run: Run, image: ImageRef | None = None) -> GuestSpec:
    """The guest; with ``image`` one that is made of another image than the server's own."""
    server = run.server
    keys = [{"name": server.key_name, "type": "ssh", "data": server.key_data}] if server.key_name else []
    instance: dict[str, Any] = {
        "name": server.name, "hostname": server.hostname, "project_id": server.project_id,
        "availability_zone": run.changes.get("availability_zone", server.availability_zone),
        "launch_index": server.launch_index, "meta": server.meta, "keys": keys,
        "files": run.action.args.get("files", [])}
    password = run.secrets(engine).get("admin_pass")
    if password:
        instance["admin_pass"] = password
    return GuestSpec(
        server=server.id, fence=run.action.fence, name=server.name, flavor=from_wire(Flavor, server.flavor),
        image=image or own_image(run), config_drive=bool(server.config_drive), user_data=server.user_data,
        instance=instance)


def own_image(run: Run) -> ImageRef | None:
    """The image that the server was made of."""
    return from_wire(ImageRef, run.server.image) if run.server.image else None
