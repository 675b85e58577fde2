# SPDX-License-Identifier: Apache-2.0
"""``kilonova host adopt HOST SERVER``: creates the server's record for a guest without one.

The host reports facts about the server (``common.domain.server_facts``), the network service the
server's ports, and the other hosts whether they have a guest of it too.

Invariant: better sources override the host. The command takes only ports that belong to the server
in the network service, and keeps the owner that the database has. Nothing is written before an
operator has seen the result and given ``--yes``.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from oslo_config import cfg

from common.domain import errors, hardware, states
from common.domain.clock import iso
from common.domain.json_types import JsonObject
from common.domain.models import Flavor, ImageRef, Interface
from common.domain.server_facts import HostedServer
from common.domain.wire import from_wire, to_wire
from common.rpc import agent
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide
from common.service import config
from common.service.notification_options import NotificationSettings
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_keys, host_status
from common.store.servers import servers, volumes
from compute_api.compute import service
from compute_api.compute.request.quota import KeystoneLimits, Quota
from compute_api.http.validation import Schema
from deploy.operator.explain import flavor_named, image_named
from deploy.operator.hosts.facts import HostAnswers, Ports, ask_hosts, ports_of
from deploy.operator.store import adoption
from deploy.operator.store.adoption import Adoption

_LINE: JsonObject = {"type": "string", "maxLength": 255, "format": "printable"}
_SPECS: JsonObject = {
    "type": "object",
    "maxProperties": 256,
    "propertyNames": _LINE,
    "additionalProperties": {"type": "string", "maxLength": 1024},
}
_NUMBER: JsonObject = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_FLAVOR: JsonObject = {
    "type": ["object", "null"],
    "required": ["id", "name", "vcpus", "memory_mb", "root_gb"],
    "properties": {
        **dict.fromkeys(("id", "name"), _LINE),
        **dict.fromkeys(("root_gb", "ephemeral_gb", "swap_mb", "number"), _NUMBER),
        **dict.fromkeys(("vcpus", "memory_mb"), {**_NUMBER, "minimum": 1}),
        "extra_specs": _SPECS,
    },
}
_IMAGE: JsonObject = {
    "type": ["object", "null"],
    "required": ["id"],
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        **dict.fromkeys(("disk_format", "hash_algo", "hash_value"), _LINE),
        "size": {"type": "integer", "minimum": 0},
        "properties": _SPECS,
    },
}
#: The schema of a host's facts. They are checked as a user's input is.
ANSWER = Schema(
    {
        "type": "object",
        "required": ["power_state", "fence", "facts"],
        "properties": {
            "power_state": {"enum": [0, 1, 3, 4, 6, 7]},
            "fence": {"type": "integer", "minimum": 1, "maximum": 2**48},
            "facts": {
                "type": "object",
                "properties": {
                    **dict.fromkeys(
                        ("name", "project_id", "user_id", "hostname", "key_name"), _LINE
                    ),
                    **dict.fromkeys(
                        ("availability_zone", "pinned_availability_zone", "root_device_name"),
                        _LINE,
                    ),
                    "key_data": {"type": "string", "maxLength": 65535},
                    "reservation_id": {"type": "string", "maxLength": 32},
                    "created_at": {"type": "integer", "minimum": 0, "maximum": 2**62},
                    "launch_index": _NUMBER,
                    **dict.fromkeys(
                        ("config_drive", "is_suspended", "is_rescued"), {"type": "boolean"}
                    ),
                    "ports": {
                        "type": "object",
                        "maxProperties": 256,
                        "propertyNames": {"type": "string", "format": "uuid"},
                        "additionalProperties": {"type": "string", "maxLength": 60},
                    },
                    "security_groups": {"type": "array", "maxItems": 256, "items": _LINE},
                    "disks": {"type": ["object", "null"]},
                    "volumes": {
                        "type": "array",
                        "maxItems": 256,
                        "items": {"type": "string", "format": "uuid"},
                    },
                    "assignment": {"type": ["object", "null"]},
                    "flavor": _FLAVOR,
                    "image": _IMAGE,
                },
            },
        },
    }
)
#: Fields that the row needs, and the options that set them.
NEEDED = {"name": "--name", "project_id": "--project", "user_id": "--user", "flavor": "--flavor"}
#: Facts that hosts do not store.
LOST = "its description, metadata, tags, server group, scheduler hints, lock, user data, shares"


@dataclass(frozen=True)
class Sources:
    """The sources of facts about a server."""

    store: Store
    hosts: HostAnswers
    ports: Ports
    quota: Quota
    #: Returns a flavor by id or name.
    flavor: Callable[[str], Flavor]
    #: Returns an image by id or name.
    image: Callable[[str], ImageRef]
    default_zone: str = "nova"


def adopt(options: argparse.Namespace) -> int:
    """Print the server's record for a guest without one. With ``--yes`` also write the record.

    Returns:
        0 if the record was written, 1 without ``--yes``.

    Raises:
        BadRequest: The text is not a server's id, options are missing or not permitted, an image
            name is not unique, or the flavor or image requires hardware that is not accepted.
        NotFound: The host, the guest on the host, or the flavor or image of an option does not
            exist.
        Conflict, OverQuota, Busy: The adoption is not possible, or not at present.
        Unavailable: The host or an external service does not answer.
    """
    try:
        server = str(uuid.UUID(options.server))
    except ValueError as problem:
        raise errors.BadRequest(
            f"{options.server!r} is not the id of a server; kilonova doctor shows the id"
        ) from problem
    conf = config.load(options.config)
    with closing(Store.open(conf, notifications=NotificationSettings.of(conf))) as store:
        upgrades.check(store)
        keystone = _keystone(conf)
        with closing(ControlSide(opener(conf), host_keys.of_all(store, conf))) as link:
            settings = service.settings(conf)
            return carry_out(
                Sources(
                    store,
                    agent.AgentClient(link),
                    ports_of(conf),
                    Quota(settings.quota, keystone, settings.unregistered),
                    lambda word: hardware.with_aliases(
                        store.read(lambda tx: flavor_named(tx, word)), conf.api.pci_alias
                    ),
                    lambda word: image_named(conf, word).ref,
                    conf.scheduler.default_availability_zone,
                ),
                server,
                options,
            )


def _keystone(conf: cfg.ConfigOpts) -> KeystoneLimits | None:
    from common.clients import limits

    return limits.configured(conf)


def carry_out(sources: Sources, server: str, options: argparse.Namespace) -> int:
    """Run the command with these sources. Results and errors are those of ``adopt``."""
    store, host = sources.store, options.host
    if not store.read(lambda tx: host_status.host_state(tx, host)).answers:
        raise errors.Conflict(f"Host {host} does not answer. Start its kilonova-agent first.")
    answer = sources.hosts.query(host, "server_facts", {"server": server})
    if not ANSWER.is_valid(answer):
        raise errors.Conflict(
            f"The facts that host {host} reports about server {server} are not valid. To see the metadata of the "
            f"domain, run on the host: virsh metadata {server} urn:kilonova:server:1"
        )
    record = store.read(lambda tx: Record.of(tx, server, host))
    if record is not None and record.host == host:
        raise errors.Conflict(
            f"The record of server {server} has host {host} already: there is nothing to adopt."
        )
    reported = from_wire(HostedServer, answer["facts"])
    _refuse_strange_volumes(store, server, reported.volumes)
    facts = _complete_facts(sources, reported, record, options)
    adoption_plan = _plan(sources, server, answer, facts, record, options)
    silent = _check_places(sources, adoption_plan, options)
    for line in describe(adoption_plan, sources, silent):
        print(line)
    if not options.yes:
        print("nothing was written. To write this record, repeat the command with --yes")
        return 1
    limits = sources.quota.source(adoption_plan.facts.project_id)
    store.write(lambda tx: adoption.adopt(tx, adoption_plan, limits(tx)))
    print(f"server {server} is on host {host}: openstack server show {server}")
    return 0


@dataclass(frozen=True)
class Record:
    """The record of a server in the database. ``host`` is "" without a host."""

    host: str
    facts: HostedServer

    @classmethod
    def of(cls, tx: Connection, server: str, host: str) -> Record | None:
        """Return the record, or None if there is no such server.

        Args:
            tx: The transaction.
            server: Id of the server.
            host: The host with the guest, for the text of the error.

        Raises:
            Conflict: The server was deleted.
        """
        try:
            row = servers.show(tx, server, deleted=True)
        except errors.NotFound:
            return None
        values = servers.writable_columns(row, ("deleted", "flavor", "image", "interfaces"))
        if values["deleted"]:
            raise adoption.was_deleted(server, host)
        return cls(
            row.host or "",
            HostedServer(
                name=row.name,
                project_id=row.project_id,
                user_id=row.user_id,
                flavor=from_wire(Flavor, values["flavor"]),
                image=from_wire(ImageRef, values["image"]) if values["image"] else None,
                ports={
                    interface["port"]: interface.get("tag") or ""
                    for interface in values["interfaces"] or ()
                },
            ),
        )


def _refuse_strange_volumes(store: Store, server: str, guest_volumes: Sequence[str]) -> None:
    """Check that the server has a row for each volume of the guest.

    Otherwise the guest would lose the volume, perhaps the boot volume, at the next start.

    Raises:
        Conflict: The guest has a volume without a row.
    """
    rows = store.read(lambda tx: volumes.list_of(tx, server))
    strange = sorted(set(guest_volumes) - {str(row.volume_id) for row in rows})
    if strange:
        raise errors.Conflict(
            f"The guest has volume {', '.join(strange)}, but the server's record has not, so the guest cannot be "
            "adopted. Stop the guest, remove it with kilonova host discard, and create a server with the volume. "
            "The data on the volume stays."
        )


def _complete_facts(
    sources: Sources, facts: HostedServer, record: Record | None, options: argparse.Namespace
) -> HostedServer:
    """Return the facts about the server from the host, the record and the options.

    Name and user of a record replace those of the host, and the record's other facts fill gaps.
    Options replace both.

    Raises:
        BadRequest: The server has a record and ``--name``, ``--project`` or ``--user`` is given, or
            a fact is missing.
        Problem: The flavor or image of an option was not found.
    """
    if record is not None:
        owner_options = [
            f"--{name}" for name in ("name", "project", "user") if getattr(options, name)
        ]
        if owner_options:
            raise errors.BadRequest(
                f"{owner_options[0]}: the server has a record, and keeps its name, project and user."
            )
        facts = replace(
            facts,
            name=record.facts.name,
            project_id=facts.project_id or record.facts.project_id,
            user_id=record.facts.user_id,
            flavor=facts.flavor or record.facts.flavor,
            image=facts.image or record.facts.image,
            ports={**record.facts.ports, **facts.ports},
        )
    if options.flavor:
        facts = replace(facts, flavor=sources.flavor(options.flavor))
    if options.image:
        facts = replace(facts, image=sources.image(options.image))
    facts = replace(
        facts,
        name=options.name or facts.name,
        project_id=options.project or facts.project_id,
        user_id=options.user or facts.user_id,
    )
    missing = [option for name, option in NEEDED.items() if not getattr(facts, name)]
    if missing:
        raise errors.BadRequest(
            f"The host does not report all facts about the server. Give {', '.join(missing)}"
            + ("" if facts.image else ", and --image if it is known")
            + "."
        )
    return facts


def _plan(
    sources: Sources,
    server: str,
    answer: JsonObject,
    facts: HostedServer,
    record: Record | None,
    options: argparse.Namespace,
) -> Adoption:
    """Return the adoption to write.

    The interfaces are the server's ports in the network service, in the order and with the tags
    that the guest has. Without a network service the adoption has no interfaces.

    Args:
        sources: Reads the ports.
        server: Id of the server.
        answer: The host's answer, with ``fence`` and ``power_state``.
        facts: The complete facts about the server.
        record: The server's record, or None for a new server.
        options: The command line.

    Raises:
        Unavailable: The network service does not answer.
    """
    ports = sources.ports(server)
    assert facts.flavor is not None, "it is needed"
    return Adoption(
        server,
        options.host,
        answer["fence"],
        answer["power_state"],
        facts,
        facts.flavor,
        [
            {**to_wire_interface(interface), "tag": facts.ports.get(interface.port, "")}
            for interface in _in_order(ports or [], facts.ports)
        ],
        None if record is None else record.host,
        options.force,
        sources.default_zone,
    )


def to_wire_interface(interface: Interface) -> JsonObject:
    """Return the interface as JSON, in the form in which the server's row stores interfaces."""
    data = to_wire(interface)
    assert isinstance(data, dict)
    return data


def _in_order(ports: list[Interface], guest_ports: Mapping[str, str]) -> list[Interface]:
    """Return the ports in the order of ``guest_ports`` (port -> tag), and all other ports last."""
    order = {port: number for number, port in enumerate(guest_ports)}
    return sorted(ports, key=lambda interface: order.get(interface.port, len(order)))


def _check_places(sources: Sources, plan: Adoption, options: argparse.Namespace) -> list[str]:
    """Check that no other host has a guest of this server.

    Returns:
        "host NAME" of each host that is down or did not answer, and so may have a guest.

    Raises:
        Conflict: Another host has a guest, or the recorded host does not answer. With ``--replace``
            a guest that is off on the recorded host is accepted.
        Problem: A host answers with this error.
    """
    silent: list[str] = []
    domains = ask_hosts(sources.store, sources.hosts.query, silent)
    others = {
        host: domains_of_host[plan.server]
        for host, domains_of_host in domains.items()
        if host != plan.host and plan.server in domains_of_host
    }
    for host, power_state in sorted(others.items()):
        if host != plan.record:
            raise errors.Conflict(
                f"Host {host} has a guest of server {plan.server} too. Find out which guest is the right one. Then "
                f"discard the other one, for example: kilonova host discard {host} {plan.server}"
            )
        if power_state != states.SHUTDOWN:
            raise errors.Conflict(
                f"The server runs on host {host}, which is its recorded host. If the guest on host {plan.host} is "
                "the right one, stop the server first."
            )
        if not options.replace:
            raise errors.Conflict(
                f"Server {plan.server}: host {host}, which is its recorded host, has a guest too, which is off. "
                f"To keep the guest on {host}: kilonova host discard {plan.host} {plan.server}. To keep the guest on "
                f"{plan.host}: repeat the command with --replace, which removes the guest on {host} with its disk."
            )
    if plan.record and f"host {plan.record}" in silent:
        raise errors.Conflict(
            f"Host {plan.record}, which is the server's recorded host, does not answer and may have its guest. "
            f"Start kilonova-agent on {plan.record} first."
        )
    return silent


def describe(plan: Adoption, sources: Sources, silent: list[str]) -> list[str]:
    """Return the record to write as lines of text.

    For a new record the lines also name the facts that are lost, because hosts do not store them.

    Args:
        plan: The adoption.
        sources: Looks up the present flavor.
        silent: Hosts that did not answer ("host NAME").

    Raises:
        BadRequest: The flavor or the image requires hardware that Kilonova does not accept.
    """
    facts, flavor = plan.facts, plan.flavor
    lines = [
        f"server {plan.server} ({facts.name}) of project {facts.project_id}, user {facts.user_id}"
        + (f", created {iso(facts.created_at)}" if facts.created_at else ""),
        f"  on host {plan.host}, {plan.vm_state}"
        + ("" if plan.record is None else f"; its record names {plan.record or 'no host'}"),
        f"  flavor {flavor.name} ({flavor.id}): {flavor.vcpus} VCPUs, {flavor.memory_mb} MiB, "
        f"{flavor.disk_gb} GiB{_flavor_difference(sources, flavor)}",
        f"  image {facts.image.id if facts.image else 'not known'}"
        + (f", key {facts.key_name}" if facts.key_name else ""),
        *(
            f"  port {item['port']} ({item['mac']}) on network {item['network']}"
            for item in plan.interfaces
        ),
        *(
            f"  port {port} of the guest is not a port of the server any more, and is left out"
            for port in sorted(set(facts.ports) - {item["port"] for item in plan.interfaces})
        ),
        f"  claims {', '.join(f'{amount} {name}' for name, amount in sorted(plan.size.items()))} of the host",
    ]
    if plan.record is None:
        lines.append(f"  lost, because hosts do not store them: {LOST}")
    lines += [
        f"  {item} did not answer: make sure that it has no guest of this server"
        for item in sorted(silent)
    ]
    return lines


def _flavor_difference(sources: Sources, flavor: Flavor) -> str:
    """Return a text if the flavor does not exist any more or has changed, otherwise ""."""
    try:
        now = sources.flavor(flavor.id)
    except errors.NotFound:
        return "; this flavor does not exist any more"
    return "" if now == flavor else "; the flavor with this id has changed since"
