# SPDX-License-Identifier: Apache-2.0
"""How each workflow of tier 2 is asked for: from which status to which, and what must be there."""

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


def nothing(stage: Stage) -> None:
    """Most need nothing before."""


@dataclass(frozen=True)
class How:
    """``before``: what must be there; ``powers_off``: its guest is asked to power off, and must
    have booted to hear it; ``wipes``: its disk is another one afterwards."""

    ask: Callable[[Stage], Any]
    begins: str = "ACTIVE"
    ends: str = "ACTIVE"
    before: Callable[[Stage], None] = nothing
    powers_off: bool = False
    wipes: bool = False


def act(key: str, value: object = None, expected: int = 202) -> Callable[[Stage], Any]:
    return lambda stage: stage.act(key, value, expected).status


def name() -> str:
    return f"{NAME}-{uuid.uuid4().hex[:6]}"


def resize(stage: Stage) -> Any:
    """To the one of two flavors that it does not have, which has more memory."""
    other = ensure_flavor(stage.lab, "pairs.larger", ram=160, vcpus=1, disk=1)
    has = stage.rest.server(stage.server)["flavor"]["original_name"]
    flavor = stage.lab.flavor() if has == "pairs.larger" else other
    return stage.act("resize", {"flavorRef": flavor}).status


def migrate_live(stage: Stage) -> Any:
    where = {"host": stage.there, "block_migration": "auto"}
    return stage.act("os-migrateLive", where).status


# --- interfaces and groups ---
def ports(stage: Stage) -> list[str]:
    listed = stage.call("GET", "/os-interface").body["interfaceAttachments"]
    return [one["port_id"] for one in listed]


def attach_interface(stage: Stage) -> Any:
    network = next(iter(stage.lab.seed.demo.network.networks(name=PRIVATE)))
    body = {"interfaceAttachment": {"net_id": network.id}}
    return stage.call("POST", "/os-interface", body).status


def detach_interface(stage: Stage) -> Any:
    """Of the later ones, which have no floating address."""
    floating = {ip.port_id for ip in stage.lab.seed.demo.network.ips()}
    port = next(one for one in ports(stage) if one not in floating)
    return stage.call("DELETE", f"/os-interface/{port}").status


def two_interfaces(stage: Stage) -> None:
    if len(ports(stage)) == 1:
        stage.does("attach_interface")


def one_interface(stage: Stage) -> None:
    while len(ports(stage)) > 1:
        stage.does("detach_interface")


def is_in_group(stage: Stage) -> bool:
    listed = stage.call("GET", "/os-security-groups").body["security_groups"]
    return NAME in [one["name"] for one in listed]


def make_group(stage: Stage) -> None:
    network = stage.lab.seed.demo.network
    if network.find_security_group(NAME) is None:
        network.create_security_group(name=NAME)


def outside_group(stage: Stage) -> None:
    make_group(stage)
    if is_in_group(stage):
        stage.does("remove_security_group")


def inside_group(stage: Stage) -> None:
    make_group(stage)
    if not is_in_group(stage):
        stage.does("add_security_group")


# --- volumes ---
VOLUMES = "/os-volume_attachments"


def attached(stage: Stage) -> list[str]:
    return [one["volumeId"] for one in stage.call("GET", VOLUMES).body["volumeAttachments"]]


def free(stage: Stage) -> str:
    """The volume of all cells, when nobody has it."""
    if not stage.volumes:
        stage.volumes.append(make_volume(stage.lab, name()))
    [volume] = stage.volumes
    await_true(lambda: is_free(stage.lab, volume), SETTLE, f"{volume} is free")
    return volume


def attach_volume(stage: Stage) -> Any:
    return stage.call("POST", VOLUMES, {"volumeAttachment": {"volumeId": free(stage)}}).status


def detach_volume(stage: Stage) -> Any:
    return stage.call("DELETE", f"{VOLUMES}/{attached(stage)[0]}").status


def without_volume(stage: Stage) -> None:
    while attached(stage):
        stage.does("detach_volume")


def with_volume(stage: Stage) -> None:
    if not attached(stage):
        stage.does("attach_volume")


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


HOW: dict[str, How] = {
    "start": How(act("os-start"), OFF),
    "stop": How(act("os-stop"), ends=OFF, powers_off=True),
    "reboot_soft": How(act("reboot", {"type": "SOFT"}), powers_off=True),
    "reboot_hard": How(act("reboot", {"type": "HARD"})),
    "pause": How(act("pause"), ends=PAUSED),
    "unpause": How(act("unpause"), PAUSED),
    "suspend": How(act("suspend"), ends=SUSPENDED),
    "resume": How(act("resume"), SUSPENDED),
    "crash_dump": How(act("trigger_crash_dump")),
    "rescue": How(rescue, ends=RESCUE, powers_off=True),
    "unrescue": How(act("unrescue"), RESCUE),
    "rebuild": How(rebuild, powers_off=True, wipes=True),
    "snapshot": How(lambda stage: stage.act("createImage", {"name": name()}).status),
    "backup": How(lambda stage: stage.act("createBackup", {"name": name(), **_BACKUP}).status),
    "shelve": How(act("shelve"), PAUSED, OFFLOADED),  # where nothing is kept
    "offload": How(act("shelveOffload"), SHELVED, OFFLOADED),
    "unshelve": How(act("unshelve"), OFFLOADED),
    "unshelve_here": How(act("unshelve"), SHELVED),
    "attach_interface": How(attach_interface, before=one_interface),
    "detach_interface": How(detach_interface, before=two_interfaces),
    "add_security_group": How(act("addSecurityGroup", {"name": NAME}), before=outside_group),
    "remove_security_group": How(act("removeSecurityGroup", {"name": NAME}), before=inside_group),
    "attach_volume": How(attach_volume, before=without_volume),
    "detach_volume": How(detach_volume, before=with_volume),
    "resize": How(resize, ends=RESIZED, powers_off=True),
    "migrate": How(act("migrate"), ends=RESIZED, powers_off=True),
    "confirm_resize": How(act("confirmResize", expected=204), RESIZED),
    "revert_resize": How(act("revertResize"), RESIZED, powers_off=True),
    "live_migrate": How(migrate_live),
    "soft_delete": How(delete, ends=DELETED, powers_off=True),
    "restore": How(act("restore"), DELETED),
    "delete": How(delete, ends=""),
}
#: Begun otherwise.
OTHERWISE = {"create", "evacuate"}
#: From a status to ACTIVE, and from ACTIVE to a status.
BACK = {
    OFF: "start",
    PAUSED: "unpause",
    SUSPENDED: "resume",
    RESCUE: "unrescue",
    RESIZED: "confirm_resize",
    SHELVED: "unshelve_here",
    OFFLOADED: "unshelve",
    DELETED: "restore",
}
THERE = {
    OFF: "stop",
    PAUSED: "pause",
    SUSPENDED: "suspend",
    RESCUE: "rescue",
    RESIZED: "resize",
    SHELVED: "shelve",
    OFFLOADED: "shelve",
    DELETED: "soft_delete",
}
