# SPDX-License-Identifier: Apache-2.0
"""``python conformance_runner.py RUNNER ARGUMENT…``: the runner of the conformance data, and
handlers of our own.

Its own handlers are those that its reference could prove; ours exercise what that one lacked:
security groups, floating addresses, interfaces, volumes, the alias of /servers. A cloud needs a
network whose router leads to an external network, and a volume service; CONFORMANCE_PORT is a free
port of the user on the first network. Volumes stay, detached: who runs this deletes the user's.
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

#: Operations of which the data have no request, and what we send: (first microversion, last, body);
#: "*": the latest.
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
#: The alias /os-volumes_boot -> the operation whose handler serves it, too.
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
#: Since when an attachment has a tag.
TAGS = 49
#: Seconds that a port or a volume may take to come or go.
SETTLE = 30

Handler = Callable[[Any], None]


def main(runner: str) -> None:
    """Add our handlers to the runner's, and run it."""
    sys.path.insert(0, runner)
    handlers = importlib.import_module("handlers")
    for alias, name in ALIASES.items():
        handlers.on(alias, needs=" ".join(handlers.NEEDS[name]))(handlers.HANDLERS[name])
    for needs, ours in (("network network-proxy", OURS), ("volume", OF_VOLUMES)):
        for name, handler in ours.items():
            handlers.on(name, needs=needs)(handler)
    sys.argv[:2] = [runner]
    runpy.run_path(runner, run_name="__main__")


def write_bodies(folder: Path) -> Path:
    """BODIES as a folder of data that the runner merges with its own (its argument --data); returns
    the folder."""
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
def made(case: Any, path: str, body: dict[str, Any]) -> Iterator[str]:
    """Something of the user's that lives for one call; yields its id."""
    [found] = case.cloud.must("POST", path, body, 1, "user").values()
    try:
        yield found["id"]
    finally:
        case.cloud.request("DELETE", f"{path}/{found['id']}", actor="user")


@contextmanager
def created(case: Any, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Make such a thing by the call that is under test; it is gone afterwards."""
    answer = case.call(body)
    yield
    if answer.status_code < 300:
        [found] = answer.json().values()
        case.cloud.request("DELETE", f"{path}/{found['id']}", actor="user")


def attachments(case: Any, server: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = case.cloud.get(f"/servers/{server}/os-interface", actor="user")[
        "interfaceAttachments"
    ]
    return found


def await_number(case: Any, server: str, number: int) -> None:
    """Until the server has so many interfaces."""
    deadline = time.monotonic() + SETTLE
    while len(attachments(case, server)) != number:
        if time.monotonic() > deadline:
            case.verdict(
                False, f"{number} interfaces wanted, there are {attachments(case, server)}"
            )
            return
        time.sleep(0.1)  # the API tells nobody when an interface has come or gone


def with_second_interface(case: Any) -> tuple[str, dict[str, Any]]:
    """A server, and its interface that was attached last."""
    server = case.server()
    known = {one["port_id"] for one in attachments(case, server)}
    case.cloud.must(
        "POST",
        f"/servers/{server}/os-interface",
        {"interfaceAttachment": {"net_id": case.cloud.network}},
        1,
        "user",
    )
    await_number(case, server, len(known) + 1)
    return server, next(one for one in attachments(case, server) if one["port_id"] not in known)


def detach(case: Any, server: str, port: str) -> None:
    number = len(attachments(case, server))
    case.cloud.must("DELETE", f"/servers/{server}/os-interface/{port}", None, 1, "user")
    await_number(case, server, number - 1)


def attach_interface(case: Any) -> None:
    def edit(body: dict[str, Any]) -> None:
        wanted = body["interfaceAttachment"]
        if "port_id" in wanted:
            wanted["port_id"] = os.environ["CONFORMANCE_PORT"]
        for address in wanted.get("fixed_ips", ()):
            address["ip_address"] = f"10.0.200.{next(case.cloud.numbers) % 250 + 1}"

    server = case.server()
    answer = case.call(edit=edit, server_id=server)
    if answer.status_code < 300:
        await_number(case, server, 2)
        detach(case, server, answer.json()["interfaceAttachment"]["port_id"])


def show_interface(case: Any) -> None:
    server = case.server()
    case.call(server_id=server, id=attachments(case, server)[0]["port_id"])


def detach_interface(case: Any) -> None:
    server, added = with_second_interface(case)
    case.call(server_id=server, id=added["port_id"])
    await_number(case, server, 1)


def add_fixed_address(case: Any) -> None:
    server = case.server()
    known = addresses(case, server)
    case.call({"addFixedIp": {"networkId": case.cloud.network}}, id=server)
    await_addresses(case, server, len(known) + 1)
    for address in addresses(case, server) - known:
        case.cloud.act(server, "removeFixedIp", {"address": address}, actor="user")
    await_addresses(case, server, len(known))


def remove_fixed_address(case: Any) -> None:
    server = case.server()
    known = addresses(case, server)
    case.cloud.act(server, "addFixedIp", {"networkId": case.cloud.network}, actor="user")
    await_addresses(case, server, len(known) + 1)
    [added] = addresses(case, server) - known
    case.call({"removeFixedIp": {"address": added}}, id=server)
    await_addresses(case, server, len(known))


def addresses(case: Any, server: str) -> set[str]:
    """Of all its interfaces, without floating ones."""
    return {fixed["ip_address"] for one in attachments(case, server) for fixed in one["fixed_ips"]}


def await_addresses(case: Any, server: str, number: int) -> None:
    deadline = time.monotonic() + SETTLE
    while len(addresses(case, server)) != number:
        if time.monotonic() > deadline:
            case.verdict(False, f"{number} addresses wanted, there are {addresses(case, server)}")
            return
        time.sleep(0.1)  # the API tells nobody when an address has come or gone


def pool(case: Any) -> dict[str, str]:
    return {
        "pool": case.cloud.get("/os-floating-ip-pools", actor="user")["floating_ip_pools"][0][
            "name"
        ]
    }


def create_floating(case: Any) -> None:
    with created(case, ADDRESSES, pool(case)):
        pass


def one_floating(case: Any) -> None:
    with made(case, ADDRESSES, pool(case)) as found:
        case.call(id=found)


def associate(case: Any) -> None:
    """addFloatingIp, and removeFloatingIp of one that was added."""
    server = case.server()
    with made(case, ADDRESSES, pool(case)) as found:
        address = case.cloud.get(f"{ADDRESSES}/{found}", actor="user")["floating_ip"]["ip"]
        if case.op.action == "removeFloatingIp":
            case.cloud.act(server, "addFloatingIp", {"address": address}, actor="user")
        case.call({case.op.action: {"address": address}}, id=server)


def group(case: Any) -> dict[str, Any]:
    return {"security_group": {"name": case.cloud.name("group"), "description": "under test"}}


def create_group(case: Any) -> None:
    with created(case, GROUPS, group(case)):
        pass


def one_group(case: Any) -> None:
    with made(case, GROUPS, group(case)) as found:
        case.call(group(case) if case.op.method == "PUT" else None, id=found)


def rule(parent: str) -> dict[str, Any]:
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
        made(case, GROUPS, group(case)) as parent,
        created(case, "/os-security-group-rules", rule(parent)),
    ):
        pass


def delete_rule(case: Any) -> None:
    with (
        made(case, GROUPS, group(case)) as parent,
        made(case, "/os-security-group-rules", rule(parent)) as found,
    ):
        case.call(id=found)


def join_group(case: Any) -> None:
    """addSecurityGroup, and removeSecurityGroup of one that was added."""
    server, wanted = case.server(), group(case)
    name = {"name": wanted["security_group"]["name"]}
    with made(case, GROUPS, wanted):
        if case.op.action == "removeSecurityGroup":
            case.cloud.act(server, "addSecurityGroup", name, actor="user")
        case.call({case.op.action: name}, id=server)
        if case.op.action == "addSecurityGroup":
            case.cloud.act(server, "removeSecurityGroup", name, actor="user")


def volume(case: Any) -> dict[str, Any]:
    return {"volume": {"size": 1, "display_name": case.cloud.name("volume")}}


def snapshot(case: Any, parent: str) -> dict[str, Any]:
    return {"snapshot": {"volume_id": parent, "display_name": case.cloud.name("snapshot")}}


def await_status(case: Any, path: str, status: str) -> None:
    """Until a volume or snapshot has it; "": until it is gone."""
    deadline = time.monotonic() + SETTLE
    while True:
        answer = case.cloud.request("GET", path, actor="user")
        [found] = answer.json().values()
        if status == ("" if answer.status_code == 404 else found.get("status")):
            return
        if time.monotonic() > deadline:
            case.verdict(False, f"{path} is to be {status or 'gone'}: {found}")
            return
        time.sleep(0.05)  # the service tells nobody when something is ready


def stored(case: Any, path: str, answer: Any) -> str:
    """The path of what such an answer says was made, once it can be used."""
    [found] = answer.values()
    await_status(case, f"{path}/{found['id']}", "available")
    return f"{path}/{found['id']}"


def store(case: Any, path: str, body: dict[str, Any]) -> str:
    """Make a volume or a snapshot of the user's; returns its path."""
    return stored(case, path, case.cloud.must("POST", path, body, 1, "user"))


def remove(case: Any, path: str) -> None:
    case.cloud.request("DELETE", path, actor="user")
    await_status(case, path, "")


def create_volume(case: Any) -> None:
    answer = case.call(volume(case))
    if answer.status_code < 300:
        remove(case, stored(case, VOLUMES, answer.json()))


def create_snapshot(case: Any) -> None:
    with free_volume(case) as parent:
        answer = case.call(edit=lambda body: body["snapshot"].update(volume_id=parent))
        if answer.status_code < 300:
            remove(case, stored(case, SNAPSHOTS, answer.json()))


def one_volume(case: Any) -> None:
    """Shown or deleted."""
    found = store(case, VOLUMES, volume(case))
    case.call(id=found.rpartition("/")[2])
    if case.op.method == "GET":
        case.cloud.request("DELETE", found, actor="user")
    await_status(case, found, "")


def one_snapshot(case: Any) -> None:
    """Shown or deleted."""
    with free_volume(case) as parent:
        found = store(case, SNAPSHOTS, snapshot(case, parent))
        case.call(id=found.rpartition("/")[2])
        if case.op.method == "GET":
            case.cloud.request("DELETE", found, actor="user")
        await_status(case, found, "")


def list_stored(case: Any) -> None:
    """Volumes or snapshots, of which there is one."""
    with free_volume(case) as parent:
        wants_snapshot = case.op.route.startswith(SNAPSHOTS)
        found = store(case, SNAPSHOTS, snapshot(case, parent)) if wants_snapshot else None
        [listed] = case.call().json().values()
        case.verdict(bool(listed), "the list is empty")
        if found is not None:
            remove(case, found)


@contextmanager
def free_volume(case: Any) -> Iterator[str]:
    """The id of a volume of the user's that nobody else has for the block, and then everybody may
    have."""
    free: list[str] = case.cloud.once("free volumes", list)
    try:
        found = free.pop()
    except IndexError:
        found = store(case, VOLUMES, volume(case)).rpartition("/")[2]
    yield found
    await_status(case, f"{VOLUMES}/{found}", "available")
    free.append(found)


@contextmanager
def attached(case: Any, server: str) -> Iterator[str]:
    """The id of a volume that the server has for the block."""
    with free_volume(case) as found:
        path = f"/servers/{server}/os-volume_attachments"
        given = {"volumeId": found, "device": "/dev/sdb", "tag": "foo"}
        case.cloud.must("POST", path, {"volumeAttachment": given}, TAGS, "user")
        await_status(case, f"{VOLUMES}/{found}", "in-use")
        yield found
        case.cloud.request("DELETE", f"{path}/{found}", actor="user")


def attach_volume(case: Any) -> None:
    server = case.server()
    with free_volume(case) as found:
        answer = case.call(
            edit=lambda body: body["volumeAttachment"].update(volumeId=found), server_id=server
        )
        if answer.status_code < 300:
            await_status(case, f"{VOLUMES}/{found}", "in-use")
            path = f"/servers/{server}/os-volume_attachments/{found}"
            case.cloud.must("DELETE", path, None, 1, "user")


def show_attachment(case: Any) -> None:
    """One, or all of a server."""
    server = case.server()
    with attached(case, server) as found:
        answer = case.call(server_id=server, id=found).json()
        if "{id}" not in case.op.route:
            case.verdict(len(answer["volumeAttachments"]) == 1, f"one is attached: {answer}")


def detach_volume(case: Any) -> None:
    server = case.server()
    with attached(case, server) as found:
        case.call(server_id=server, id=found)
        await_status(case, f"{VOLUMES}/{found}", "available")


def change_attachment(case: Any) -> None:
    """Changed, or refused to be exchanged: that is for a volume that its service migrates."""
    server, given = case.server(), case.sample.body["volumeAttachment"]
    with attached(case, server) as found, free_volume(case) as other:
        own = {"volumeId": found, "id": found, "serverId": server}
        if given.keys() == {"volumeId"}:
            case.call(
                edit=lambda body: body["volumeAttachment"].update(volumeId=other),
                actor="service",
                expect={409},
                server_id=server,
                id=found,
            )
        else:
            case.call(
                edit=lambda body: body["volumeAttachment"].update(
                    {name: own[name] for name in given if name in own}
                ),
                server_id=server,
                id=found,
            )


_ACTION = "POST /servers/{id}/action#"
OURS: dict[str, Handler] = {
    "POST /servers/{server_id}/os-interface": attach_interface,
    "GET /servers/{server_id}/os-interface/{id}": show_interface,
    "DELETE /servers/{server_id}/os-interface/{id}": detach_interface,
    _ACTION + "addFixedIp": add_fixed_address,
    _ACTION + "removeFixedIp": remove_fixed_address,
    "POST " + ADDRESSES: create_floating,
    **{f"{method} {ADDRESSES}/{{id}}": one_floating for method in ("GET", "DELETE")},
    _ACTION + "addFloatingIp": associate,
    _ACTION + "removeFloatingIp": associate,
    "POST " + GROUPS: create_group,
    **{f"{method} {GROUPS}/{{id}}": one_group for method in ("GET", "PUT", "DELETE")},
    "POST /os-security-group-rules": create_rule,
    "DELETE /os-security-group-rules/{id}": delete_rule,
    _ACTION + "addSecurityGroup": join_group,
    _ACTION + "removeSecurityGroup": join_group,
}
_ATTACHMENTS = "/servers/{server_id}/os-volume_attachments"
OF_VOLUMES: dict[str, Handler] = {
    **{
        f"GET {path}{more}": list_stored
        for path in (VOLUMES, SNAPSHOTS)
        for more in ("", "/detail")
    },
    f"POST {VOLUMES}": create_volume,
    f"POST {SNAPSHOTS}": create_snapshot,
    **{f"{method} {VOLUMES}/{{id}}": one_volume for method in ("GET", "DELETE")},
    **{f"{method} {SNAPSHOTS}/{{id}}": one_snapshot for method in ("GET", "DELETE")},
    f"GET {_ATTACHMENTS}": show_attachment,
    f"POST {_ATTACHMENTS}": attach_volume,
    f"GET {_ATTACHMENTS}/{{id}}": show_attachment,
    f"PUT {_ATTACHMENTS}/{{id}}": change_attachment,
    f"DELETE {_ATTACHMENTS}/{{id}}": detach_volume,
}

if __name__ == "__main__":
    main(sys.argv[1])
