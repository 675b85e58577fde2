# SPDX-License-Identifier: Apache-2.0
"""The runner of the conformance data, with handlers for parts that the reference cloud lacked.

Usage: ``python conformance_runner.py RUNNER ARGUMENT…``. The handlers exercise security groups,
floating addresses, interfaces, volumes and the alias of /servers. The cloud needs a volume service
and a network with a router to an external network. CONFORMANCE_PORT is a free port of the user on
the first network. The caller deletes the user's volumes afterwards.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Operation without a request in the data -> requests as (first microversion, last, body). "*" is
#: the latest microversion.
BODIES: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "POST /flavors/{flavor_id}/os-extra_specs": [
        ("2.1", "*", {"extra_specs": {"hw:numa_nodes": "1"}})
    ],
    "PUT /flavors/{flavor_id}/os-extra_specs/{id}": [("2.1", "*", {"hw:numa_nodes": "2"})],
    "POST /os-aggregates": [
        ("2.1", "*", {"aggregate": {"name": "name", "availability_zone": "conformance"}})
    ],
    "PUT /os-aggregates/{id}": [
        ("2.1", "*", {"aggregate": {"name": "name", "availability_zone": "conformance"}})
    ],
    "POST /os-aggregates/{id}/action#add_host": [("2.1", "*", {"add_host": {"host": "host"}})],
    "POST /os-aggregates/{id}/action#remove_host": [
        ("2.1", "*", {"remove_host": {"host": "host"}})
    ],
    "POST /os-aggregates/{id}/action#set_metadata": [
        ("2.1", "*", {"set_metadata": {"metadata": {"key": "value"}}})
    ],
    "POST /os-aggregates/{id}/images": [("2.81", "*", {"cache": [{"id": "image"}]})],
    "PUT /os-quota-class-sets/{id}": [
        ("2.1", "*", {"quota_class_set": {"instances": 50, "cores": 50, "ram": 51200}})
    ],
    "POST /os-server-groups": [
        ("2.1", "2.63", {"server_group": {"name": "name", "policies": ["affinity"]}}),
        (
            "2.64",
            "*",
            {
                "server_group": {
                    "name": "name",
                    "policy": "anti-affinity",
                    "rules": {"max_server_per_host": 3},
                }
            },
        ),
    ],
    "POST /servers/{id}/action#changePassword": [
        ("2.1", "*", {"changePassword": {"adminPass": "secret"}})
    ],
    "POST /servers/{id}/action#createBackup": [
        ("2.1", "*", {"createBackup": {"name": "name", "backup_type": "daily", "rotation": 1}})
    ],
    "POST /servers/{id}/action#lock": [
        ("2.1", "*", {"lock": None}),
        ("2.1", "*", {"lock": {"locked_reason": "under test"}}),
    ],
    "POST /servers/{id}/action#rescue": [("2.1", "*", {"rescue": {"adminPass": "secret"}})],
    "POST /servers/{id}/action#resize": [("2.1", "*", {"resize": {"flavorRef": "flavor"}})],
    "POST /servers/{id}/action#restore": [("2.1", "*", {"restore": None})],
    "POST /servers/{id}/action#suspend": [("2.1", "*", {"suspend": None})],
    "POST /servers/{id}/action#trigger_crash_dump": [("2.17", "*", {"trigger_crash_dump": None})],
    "POST /servers/{id}/action#unshelve": [("2.1", "*", {"unshelve": None})],
    "PUT /servers/{server_id}/tags": [("2.26", "*", {"tags": ["one", "two"]})],
    "POST /servers/{id}/action#evacuate": [
        (
            "2.1",
            "2.13",
            {"evacuate": {"host": "host", "onSharedStorage": "False", "adminPass": "secret"}},
        ),
        ("2.14", "*", {"evacuate": {"host": "host", "adminPass": "secret"}}),
    ],
}
#: Operation of the alias /os-volumes_boot -> operation with the handler for both.
ALIASES = {
    "POST /os-volumes_boot": "POST /servers",
    "PUT /os-volumes_boot/{id}": "PUT /servers/{id}",
    **{
        f"POST /os-volumes_boot/{{id}}/action#{action}": f"POST /servers/{{id}}/action#{action}"
        for action in (
            "confirmResize",
            "createImage",
            "os-start",
            "os-stop",
            "reboot",
            "rebuild",
            "resize",
            "revertResize",
            "trigger_crash_dump",
        )
    },
}
GROUPS, ADDRESSES = "/os-security-groups", "/os-floating-ips"
VOLUMES, SNAPSHOTS = "/os-volumes", "/os-snapshots"
#: Minor microversion that adds tags to attachments.
TAGS = 49
#: Seconds until a port or a volume must be attached, detached, created or deleted.
SETTLE = 30

Handler = Callable[[Any], None]


def main(runner: str) -> None:
    """Add the handlers of this module to the runner, and start the runner."""
    sys.path.insert(0, runner)
    handlers = importlib.import_module("handlers")
    for alias, name in ALIASES.items():
        handlers.on(alias, needs=" ".join(handlers.NEEDS[name]))(handlers.HANDLERS[name])
    for needs, handlers_by_operation in (
        ("network network-proxy", NETWORK_HANDLERS),
        ("volume", VOLUME_HANDLERS),
    ):
        for name, handler in handlers_by_operation.items():
            handlers.on(name, needs=needs)(handler)
    sys.argv[:2] = [runner]
    runpy.run_path(runner, run_name="__main__")


def write_bodies(folder: Path) -> Path:
    """Write BODIES into a folder in the format of the runner's argument --data.

    The runner merges this data with the runner's data. Return the folder.
    """
    manifest = []
    for number, (name, bodies) in enumerate(BODIES.items()):
        for part, (since, until, body) in enumerate(bodies):
            path = folder / "samples" / f"{number}-{part}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(body))
            manifest.append(
                {
                    "file": path.name,
                    "op": name,
                    "kind": "request",
                    "microversion": since,
                    "valid": [[since, until]],
                }
            )
    (folder / "samples.json").write_text(json.dumps(manifest))
    return folder


@contextmanager
def temporary(case: Any, path: str, body: dict[str, Any]) -> Iterator[str]:
    """Create an object of the user, yield the id, and delete the object afterwards."""
    [resource] = case.cloud.must("POST", path, body, 1, "user").values()
    try:
        yield resource["id"]
    finally:
        case.cloud.request("DELETE", f"{path}/{resource['id']}", actor="user")


@contextmanager
def call_create(case: Any, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Create an object with the call under test, and delete the object afterwards."""
    answer = case.call(body)
    yield
    if answer.status_code < 300:
        [resource] = answer.json().values()
        case.cloud.request("DELETE", f"{path}/{resource['id']}", actor="user")


def list_interfaces(case: Any, server: str) -> list[dict[str, Any]]:
    interfaces: list[dict[str, Any]] = case.cloud.get(
        f"/servers/{server}/os-interface", actor="user"
    )["interfaceAttachments"]
    return interfaces


def await_number(case: Any, server: str, number: int) -> None:
    """Wait until the server has so many interfaces."""
    deadline = time.monotonic() + SETTLE
    while len(list_interfaces(case, server)) != number:
        if time.monotonic() > deadline:
            case.verdict(
                False, f"{number} interfaces wanted, there are {list_interfaces(case, server)}"
            )
            return
        # The API sends no notification of attached or detached interfaces.
        time.sleep(0.1)


def with_second_interface(case: Any) -> tuple[str, dict[str, Any]]:
    """Attach an interface to a server, and return the server and the new interface."""
    server = case.server()
    before = {interface["port_id"] for interface in list_interfaces(case, server)}
    case.cloud.must(
        "POST",
        f"/servers/{server}/os-interface",
        {"interfaceAttachment": {"net_id": case.cloud.network}},
        1,
        "user",
    )
    await_number(case, server, len(before) + 1)
    return server, next(
        interface
        for interface in list_interfaces(case, server)
        if interface["port_id"] not in before
    )


def detach(case: Any, server: str, port: str) -> None:
    number = len(list_interfaces(case, server))
    case.cloud.must("DELETE", f"/servers/{server}/os-interface/{port}", None, 1, "user")
    await_number(case, server, number - 1)


def attach_interface(case: Any) -> None:
    def edit(body: dict[str, Any]) -> None:
        attachment = body["interfaceAttachment"]
        if "port_id" in attachment:
            attachment["port_id"] = os.environ["CONFORMANCE_PORT"]
        for address in attachment.get("fixed_ips", ()):
            address["ip_address"] = f"10.0.200.{next(case.cloud.numbers) % 250 + 1}"

    server = case.server()
    answer = case.call(edit=edit, server_id=server)
    if answer.status_code < 300:
        await_number(case, server, 2)
        detach(case, server, answer.json()["interfaceAttachment"]["port_id"])


def show_interface(case: Any) -> None:
    server = case.server()
    case.call(server_id=server, id=list_interfaces(case, server)[0]["port_id"])


def detach_interface(case: Any) -> None:
    server, added = with_second_interface(case)
    case.call(server_id=server, id=added["port_id"])
    await_number(case, server, 1)


def add_fixed_address(case: Any) -> None:
    server = case.server()
    before = list_addresses(case, server)
    case.call({"addFixedIp": {"networkId": case.cloud.network}}, id=server)
    await_addresses(case, server, len(before) + 1)
    for address in list_addresses(case, server) - before:
        case.cloud.act(server, "removeFixedIp", {"address": address}, actor="user")
    await_addresses(case, server, len(before))


def remove_fixed_address(case: Any) -> None:
    server = case.server()
    before = list_addresses(case, server)
    case.cloud.act(server, "addFixedIp", {"networkId": case.cloud.network}, actor="user")
    await_addresses(case, server, len(before) + 1)
    [added] = list_addresses(case, server) - before
    case.call({"removeFixedIp": {"address": added}}, id=server)
    await_addresses(case, server, len(before))


def list_addresses(case: Any, server: str) -> set[str]:
    """Return the fixed addresses of all interfaces of a server."""
    return {
        address["ip_address"]
        for interface in list_interfaces(case, server)
        for address in interface["fixed_ips"]
    }


def await_addresses(case: Any, server: str, number: int) -> None:
    deadline = time.monotonic() + SETTLE
    while len(list_addresses(case, server)) != number:
        if time.monotonic() > deadline:
            case.verdict(
                False, f"{number} addresses wanted, there are {list_addresses(case, server)}"
            )
            return
        # The API sends no notification of added or removed addresses.
        time.sleep(0.1)


def build_pool(case: Any) -> dict[str, str]:
    return {
        "pool": case.cloud.get("/os-floating-ip-pools", actor="user")["floating_ip_pools"][0][
            "name"
        ]
    }


def create_floating(case: Any) -> None:
    with call_create(case, ADDRESSES, build_pool(case)):
        pass


def show_or_delete_floating(case: Any) -> None:
    with temporary(case, ADDRESSES, build_pool(case)) as address_id:
        case.call(id=address_id)


def add_or_remove_floating(case: Any) -> None:
    server = case.server()
    with temporary(case, ADDRESSES, build_pool(case)) as address_id:
        address = case.cloud.get(f"{ADDRESSES}/{address_id}", actor="user")["floating_ip"]["ip"]
        if case.op.action == "removeFloatingIp":
            case.cloud.act(server, "addFloatingIp", {"address": address}, actor="user")
        case.call({case.op.action: {"address": address}}, id=server)


def build_group(case: Any) -> dict[str, Any]:
    return {"security_group": {"name": case.cloud.name("group"), "description": "under test"}}


def create_group(case: Any) -> None:
    with call_create(case, GROUPS, build_group(case)):
        pass


def show_change_or_delete_group(case: Any) -> None:
    with temporary(case, GROUPS, build_group(case)) as group_id:
        case.call(build_group(case) if case.op.method == "PUT" else None, id=group_id)


def build_rule(parent: str) -> dict[str, Any]:
    return {
        "security_group_rule": {
            "parent_group_id": parent,
            "ip_protocol": "tcp",
            "from_port": 22,
            "to_port": 22,
            "cidr": "10.0.0.0/24",
        }
    }


def create_rule(case: Any) -> None:
    with (
        temporary(case, GROUPS, build_group(case)) as parent,
        call_create(case, "/os-security-group-rules", build_rule(parent)),
    ):
        pass


def delete_rule(case: Any) -> None:
    with (
        temporary(case, GROUPS, build_group(case)) as parent,
        temporary(case, "/os-security-group-rules", build_rule(parent)) as rule_id,
    ):
        case.call(id=rule_id)


def join_or_leave_group(case: Any) -> None:
    server, group = case.server(), build_group(case)
    name = {"name": group["security_group"]["name"]}
    with temporary(case, GROUPS, group):
        if case.op.action == "removeSecurityGroup":
            case.cloud.act(server, "addSecurityGroup", name, actor="user")
        case.call({case.op.action: name}, id=server)
        if case.op.action == "addSecurityGroup":
            case.cloud.act(server, "removeSecurityGroup", name, actor="user")


def build_volume(case: Any) -> dict[str, Any]:
    return {"volume": {"size": 1, "display_name": case.cloud.name("volume")}}


def build_snapshot(case: Any, parent: str) -> dict[str, Any]:
    return {"snapshot": {"volume_id": parent, "display_name": case.cloud.name("snapshot")}}


def await_status(case: Any, path: str, status: str) -> None:
    """Wait until a volume or snapshot has the status. The status "" means deleted."""
    deadline = time.monotonic() + SETTLE
    while True:
        answer = case.cloud.request("GET", path, actor="user")
        [resource] = answer.json().values()
        if status == ("" if answer.status_code == 404 else resource.get("status")):
            return
        if time.monotonic() > deadline:
            case.verdict(False, f"{path} is to be {status or 'gone'}: {resource}")
            return
        # The service sends no notification of the status.
        time.sleep(0.05)


def await_available(case: Any, path: str, answer: Any) -> str:
    """Wait until the volume or snapshot in a create response is available. Return the path."""
    [resource] = answer.values()
    await_status(case, f"{path}/{resource['id']}", "available")
    return f"{path}/{resource['id']}"


def create_available(case: Any, path: str, body: dict[str, Any]) -> str:
    """Create an available volume or snapshot of the user. Return the path."""
    return await_available(case, path, case.cloud.must("POST", path, body, 1, "user"))


def remove(case: Any, path: str) -> None:
    case.cloud.request("DELETE", path, actor="user")
    await_status(case, path, "")


def create_volume(case: Any) -> None:
    answer = case.call(build_volume(case))
    if answer.status_code < 300:
        remove(case, await_available(case, VOLUMES, answer.json()))


def create_snapshot(case: Any) -> None:
    with free_volume(case) as parent:
        answer = case.call(edit=lambda body: body["snapshot"].update(volume_id=parent))
        if answer.status_code < 300:
            remove(case, await_available(case, SNAPSHOTS, answer.json()))


def show_or_delete_volume(case: Any) -> None:
    path = create_available(case, VOLUMES, build_volume(case))
    case.call(id=path.rpartition("/")[2])
    if case.op.method == "GET":
        case.cloud.request("DELETE", path, actor="user")
    await_status(case, path, "")


def show_or_delete_snapshot(case: Any) -> None:
    with free_volume(case) as parent:
        path = create_available(case, SNAPSHOTS, build_snapshot(case, parent))
        case.call(id=path.rpartition("/")[2])
        if case.op.method == "GET":
            case.cloud.request("DELETE", path, actor="user")
        await_status(case, path, "")


def list_volumes_or_snapshots(case: Any) -> None:
    """Call a list operation while the user has a volume, and a snapshot if snapshots are listed."""
    with free_volume(case) as parent:
        lists_snapshots = case.op.route.startswith(SNAPSHOTS)
        path = (
            create_available(case, SNAPSHOTS, build_snapshot(case, parent))
            if lists_snapshots
            else None
        )
        [rows] = case.call().json().values()
        case.verdict(bool(rows), "the list is empty")
        if path is not None:
            remove(case, path)


@contextmanager
def free_volume(case: Any) -> Iterator[str]:
    """Reserve a free volume of the user for the block, and yield the id."""
    free: list[str] = case.cloud.once("free volumes", list)
    try:
        volume_id = free.pop()
    except IndexError:
        volume_id = create_available(case, VOLUMES, build_volume(case)).rpartition("/")[2]
    yield volume_id
    await_status(case, f"{VOLUMES}/{volume_id}", "available")
    free.append(volume_id)


@contextmanager
def attached_volume(case: Any, server: str) -> Iterator[str]:
    """Attach a volume to the server for the block, and yield the id."""
    with free_volume(case) as volume_id:
        path = f"/servers/{server}/os-volume_attachments"
        attachment = {"volumeId": volume_id, "device": "/dev/sdb", "tag": "foo"}
        case.cloud.must("POST", path, {"volumeAttachment": attachment}, TAGS, "user")
        await_status(case, f"{VOLUMES}/{volume_id}", "in-use")
        yield volume_id
        case.cloud.request("DELETE", f"{path}/{volume_id}", actor="user")


def attach_volume(case: Any) -> None:
    server = case.server()
    with free_volume(case) as volume_id:
        answer = case.call(
            edit=lambda body: body["volumeAttachment"].update(volumeId=volume_id), server_id=server
        )
        if answer.status_code < 300:
            await_status(case, f"{VOLUMES}/{volume_id}", "in-use")
            path = f"/servers/{server}/os-volume_attachments/{volume_id}"
            case.cloud.must("DELETE", path, None, 1, "user")


def show_attachment(case: Any) -> None:
    """Show one attachment, or list all attachments of a server."""
    server = case.server()
    with attached_volume(case, server) as volume_id:
        answer = case.call(server_id=server, id=volume_id).json()
        if "{id}" not in case.op.route:
            case.verdict(len(answer["volumeAttachments"]) == 1, f"one is attached: {answer}")


def detach_volume(case: Any) -> None:
    server = case.server()
    with attached_volume(case, server) as volume_id:
        case.call(server_id=server, id=volume_id)
        await_status(case, f"{VOLUMES}/{volume_id}", "available")


def change_attachment(case: Any) -> None:
    """Change an attachment, or try to swap its volume.

    The API refuses the swap with 409, because the volume service does not migrate the volume.
    """
    server, sample = case.server(), case.sample.body["volumeAttachment"]
    with attached_volume(case, server) as volume_id, free_volume(case) as other:
        own = {"volumeId": volume_id, "id": volume_id, "serverId": server}
        if sample.keys() == {"volumeId"}:
            case.call(
                edit=lambda body: body["volumeAttachment"].update(volumeId=other),
                actor="service",
                expect={409},
                server_id=server,
                id=volume_id,
            )
        else:
            case.call(
                edit=lambda body: body["volumeAttachment"].update(
                    {name: own[name] for name in sample if name in own}
                ),
                server_id=server,
                id=volume_id,
            )


_ACTION = "POST /servers/{id}/action#"
NETWORK_HANDLERS: dict[str, Handler] = {
    "POST /servers/{server_id}/os-interface": attach_interface,
    "GET /servers/{server_id}/os-interface/{id}": show_interface,
    "DELETE /servers/{server_id}/os-interface/{id}": detach_interface,
    _ACTION + "addFixedIp": add_fixed_address,
    _ACTION + "removeFixedIp": remove_fixed_address,
    "POST " + ADDRESSES: create_floating,
    **{f"{method} {ADDRESSES}/{{id}}": show_or_delete_floating for method in ("GET", "DELETE")},
    _ACTION + "addFloatingIp": add_or_remove_floating,
    _ACTION + "removeFloatingIp": add_or_remove_floating,
    "POST " + GROUPS: create_group,
    **{
        f"{method} {GROUPS}/{{id}}": show_change_or_delete_group
        for method in ("GET", "PUT", "DELETE")
    },
    "POST /os-security-group-rules": create_rule,
    "DELETE /os-security-group-rules/{id}": delete_rule,
    _ACTION + "addSecurityGroup": join_or_leave_group,
    _ACTION + "removeSecurityGroup": join_or_leave_group,
}
_ATTACHMENTS = "/servers/{server_id}/os-volume_attachments"
VOLUME_HANDLERS: dict[str, Handler] = {
    **{
        f"GET {path}{more}": list_volumes_or_snapshots
        for path in (VOLUMES, SNAPSHOTS)
        for more in ("", "/detail")
    },
    f"POST {VOLUMES}": create_volume,
    f"POST {SNAPSHOTS}": create_snapshot,
    **{f"{method} {VOLUMES}/{{id}}": show_or_delete_volume for method in ("GET", "DELETE")},
    **{f"{method} {SNAPSHOTS}/{{id}}": show_or_delete_snapshot for method in ("GET", "DELETE")},
    f"GET {_ATTACHMENTS}": show_attachment,
    f"POST {_ATTACHMENTS}": attach_volume,
    f"GET {_ATTACHMENTS}/{{id}}": show_attachment,
    f"PUT {_ATTACHMENTS}/{{id}}": change_attachment,
    f"DELETE {_ATTACHMENTS}/{{id}}": detach_volume,
}

if __name__ == "__main__":
    main(sys.argv[1])
