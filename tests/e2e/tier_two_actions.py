# SPDX-License-Identifier: Apache-2.0
"""The request of each workflow of tier 2, with preconditions and statuses of the server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deploy.one_machine.connectivity import PRIVATE
from tests.e2e.live import SETTLE
from tests.e2e.test_moves import ensure_flavor
from tests.e2e.test_volume_kills import is_free, make_volume
from tests.e2e.tier_two import NAME
from tests.waiting import await_true

if TYPE_CHECKING:
    from tests.e2e.tier_two_stage import Stage


def prepare_nothing(stage: Stage) -> None:
    """Do nothing, because most workflows need only the status of the server."""


@dataclass(frozen=True)
class Recipe:
    """The request of one workflow.

    Attributes:
        request: Sends the request.
        begin_status: Status of the server before the action.
        end_status: Status of the server after the action.
        prepare: Creates the other preconditions.
        powers_off: The action shuts the guest down, which works only after the boot.
        wipes: The server has a new disk afterwards.
    """

    request: Callable[[Stage], Any]
    begin_status: str = "ACTIVE"
    end_status: str = "ACTIVE"
    prepare: Callable[[Stage], None] = prepare_nothing
    powers_off: bool = False
    wipes: bool = False


def act(key: str, value: object = None, expected: int = 202) -> Callable[[Stage], Any]:
    return lambda stage: stage.act(key, value, expected).status


def new_name() -> str:
    return f"{NAME}-{uuid.uuid4().hex[:6]}"


def resize(stage: Stage) -> Any:
    """Resize the server between the flavor m1.nano and a flavor with more memory."""
    other = ensure_flavor(stage.lab, "pairs.larger", ram=160, vcpus=1, disk=1)
    current = stage.rest.server(stage.server)["flavor"]["original_name"]
    flavor = stage.lab.flavor() if current == "pairs.larger" else other
    return stage.act("resize", {"flavorRef": flavor}).status


def migrate_live(stage: Stage) -> Any:
    destination = {"host": stage.destination, "block_migration": "auto"}
    return stage.act("os-migrateLive", destination).status


# --- interfaces and groups ---
def list_ports(stage: Stage) -> list[str]:
    interfaces = stage.call("GET", "/os-interface").body["interfaceAttachments"]
    return [interface["port_id"] for interface in interfaces]


def attach_interface(stage: Stage) -> Any:
    network = next(iter(stage.lab.seed.demo.network.networks(name=PRIVATE)))
    body = {"interfaceAttachment": {"net_id": network.id}}
    return stage.call("POST", "/os-interface", body).status


def detach_interface(stage: Stage) -> Any:
    """Detach the first interface without a floating address."""
    floating = {ip.port_id for ip in stage.lab.seed.demo.network.ips()}
    port = next(port_id for port_id in list_ports(stage) if port_id not in floating)
    return stage.call("DELETE", f"/os-interface/{port}").status


def ensure_two_interfaces(stage: Stage) -> None:
    if len(list_ports(stage)) == 1:
        stage.run_workflow("attach_interface")


def ensure_one_interface(stage: Stage) -> None:
    while len(list_ports(stage)) > 1:
        stage.run_workflow("detach_interface")


def is_in_group(stage: Stage) -> bool:
    groups = stage.call("GET", "/os-security-groups").body["security_groups"]
    return NAME in [group["name"] for group in groups]


def make_group(stage: Stage) -> None:
    network = stage.lab.seed.demo.network
    if network.find_security_group(NAME) is None:
        network.create_security_group(name=NAME)


def leave_group(stage: Stage) -> None:
    make_group(stage)
    if is_in_group(stage):
        stage.run_workflow("remove_security_group")


def join_group(stage: Stage) -> None:
    make_group(stage)
    if not is_in_group(stage):
        stage.run_workflow("add_security_group")


# --- volumes ---
VOLUMES = "/os-volume_attachments"


def list_volumes(stage: Stage) -> list[str]:
    return [
        attachment["volumeId"]
        for attachment in stage.call("GET", VOLUMES).body["volumeAttachments"]
    ]


def await_free_volume(stage: Stage) -> str:
    """Create the volume of all cells if needed, wait until available, and return the id."""
    if not stage.volumes:
        stage.volumes.append(make_volume(stage.lab, new_name()))
    [volume] = stage.volumes
    await_true(lambda: is_free(stage.lab, volume), SETTLE, f"{volume} is free")
    return volume


def attach_volume(stage: Stage) -> Any:
    return stage.call(
        "POST", VOLUMES, {"volumeAttachment": {"volumeId": await_free_volume(stage)}}
    ).status


def detach_volume(stage: Stage) -> Any:
    return stage.call("DELETE", f"{VOLUMES}/{list_volumes(stage)[0]}").status


def ensure_no_volume(stage: Stage) -> None:
    while list_volumes(stage):
        stage.run_workflow("detach_volume")


def ensure_volume(stage: Stage) -> None:
    if not list_volumes(stage):
        stage.run_workflow("attach_volume")


_BACKUP = {"backup_type": "daily", "rotation": 1}
ACTIVE, OFF, PAUSED, SUSPENDED = "ACTIVE", "SHUTOFF", "PAUSED", "SUSPENDED"
RESCUE, RESIZED, SHELVED = "RESCUE", "VERIFY_RESIZE", "SHELVED"
OFFLOADED, DELETED = "SHELVED_OFFLOADED", "SOFT_DELETED"


def rebuild(stage: Stage) -> Any:
    return stage.act("rebuild", {"imageRef": stage.lab.image()}).status


def rescue(stage: Stage) -> Any:
    return stage.act("rescue", {"rescue_image_ref": stage.lab.image()}, 200).status


def delete(stage: Stage) -> Any:
    return stage.lab.rest().insist("DELETE", stage.path, expected=(204, 404)).status


RECIPES: dict[str, Recipe] = {
    "start": Recipe(act("os-start"), OFF),
    "stop": Recipe(act("os-stop"), end_status=OFF, powers_off=True),
    "reboot_soft": Recipe(act("reboot", {"type": "SOFT"}), powers_off=True),
    "reboot_hard": Recipe(act("reboot", {"type": "HARD"})),
    "pause": Recipe(act("pause"), end_status=PAUSED),
    "unpause": Recipe(act("unpause"), PAUSED),
    "suspend": Recipe(act("suspend"), end_status=SUSPENDED),
    "resume": Recipe(act("resume"), SUSPENDED),
    "crash_dump": Recipe(act("trigger_crash_dump")),
    "rescue": Recipe(rescue, end_status=RESCUE, powers_off=True),
    "unrescue": Recipe(act("unrescue"), RESCUE),
    "rebuild": Recipe(rebuild, powers_off=True, wipes=True),
    "snapshot": Recipe(lambda stage: stage.act("createImage", {"name": new_name()}).status),
    "backup": Recipe(
        lambda stage: stage.act("createBackup", {"name": new_name(), **_BACKUP}).status
    ),
    # The cloud of the other workflows offloads a shelved server at once.
    "shelve": Recipe(act("shelve"), PAUSED, OFFLOADED),
    "offload": Recipe(act("shelveOffload"), SHELVED, OFFLOADED),
    "unshelve": Recipe(act("unshelve"), OFFLOADED),
    "unshelve_here": Recipe(act("unshelve"), SHELVED),
    "attach_interface": Recipe(attach_interface, prepare=ensure_one_interface),
    "detach_interface": Recipe(detach_interface, prepare=ensure_two_interfaces),
    "add_security_group": Recipe(act("addSecurityGroup", {"name": NAME}), prepare=leave_group),
    "remove_security_group": Recipe(act("removeSecurityGroup", {"name": NAME}), prepare=join_group),
    "attach_volume": Recipe(attach_volume, prepare=ensure_no_volume),
    "detach_volume": Recipe(detach_volume, prepare=ensure_volume),
    "resize": Recipe(resize, end_status=RESIZED, powers_off=True),
    "migrate": Recipe(act("migrate"), end_status=RESIZED, powers_off=True),
    "confirm_resize": Recipe(act("confirmResize", expected=204), RESIZED),
    "revert_resize": Recipe(act("revertResize"), RESIZED, powers_off=True),
    "live_migrate": Recipe(migrate_live),
    "soft_delete": Recipe(delete, end_status=DELETED, powers_off=True),
    "restore": Recipe(act("restore"), DELETED),
    "delete": Recipe(delete, end_status=""),
}
#: Workflows with requests in tier_two_stage.py and test_tier_two.py.
OTHER_WORKFLOWS = {"create", "evacuate"}
#: Status -> workflow from this status to ACTIVE, and from ACTIVE to this status.
TO_ACTIVE = {
    OFF: "start",
    PAUSED: "unpause",
    SUSPENDED: "resume",
    RESCUE: "unrescue",
    RESIZED: "confirm_resize",
    SHELVED: "unshelve_here",
    OFFLOADED: "unshelve",
    DELETED: "restore",
}
FROM_ACTIVE = {
    OFF: "stop",
    PAUSED: "pause",
    SUSPENDED: "suspend",
    RESCUE: "rescue",
    RESIZED: "resize",
    SHELVED: "shelve",
    OFFLOADED: "shelve",
    DELETED: "soft_delete",
}
