# SPDX-License-Identifier: Apache-2.0
"""``kilonova host adopt HOST SERVER``: a guest that no record knows becomes a server again.

The host tells what it remembers of the server (``common.domain.server_facts``), the network
service which ports it has, the other hosts whether one of them has a guest of it too. Must stay
true: a host is not believed in what another can say: a port that is not the server's by the
network service's word is not taken, and where the database has the server its owner stays. Nothing
is written before an operator has seen all of it and said ``--yes``.
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
#: What a host may say of a guest: the agent's word is checked as a user's is.
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
#: Fields without which nothing can be written, and the options that say them.
NEEDED = {"name": "--name", "project_id": "--project", "user_id": "--user", "flavor": "--flavor"}
#: What no host remembers.
LOST = "its description, metadata, tags, server group, scheduler hints, lock, user data, shares"


@dataclass(frozen=True)
class Sources:
    """Whom the command asks. ports: the server's by the network service, None where the cloud has
    no such service; quota: whose limits are in force; flavor, image: by id or name."""

    store: Store
    hosts: HostAnswers
    ports: Ports
    quota: Quota
    flavor: Callable[[str], Flavor]
    image: Callable[[str], ImageRef]
    default_zone: str = "nova"


def adopt(options: argparse.Namespace) -> int:
    """Show what would be written; with --yes write it.

    Raises:
        BadRequest: it is no server's id, or options are missing. Conflict, OverQuota: it cannot be.
        Unavailable: host or network service do not answer.
    """
    try:
        server = str(uuid.UUID(options.server))
    except ValueError as problem:
        raise errors.BadRequest(
            f"{options.server!r} is no server's id; kilonova doctor shows it"
        ) from problem
    conf = config.load(options.config)
    with closing(Store.opened(conf, notifications=NotificationSettings.of(conf))) as store:
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
    """The command, whomever it asks."""
    store, host = sources.store, options.host
    if not store.read(lambda tx: host_status.host_state(tx, host)).answers:
        raise errors.Conflict(f"Host {host} does not answer: start its kilonova-agent first.")
    answer = sources.hosts.query(host, "server_facts", {"server": server})
    if not ANSWER.is_valid(answer):
        raise errors.Conflict(
            f"What host {host} says of {server} makes no sense; see the metadata of its domain "
            f"there: virsh metadata {server} urn:kilonova:server:1"
        )
    record = store.read(lambda tx: Record.of(tx, server, host))
    if record is not None and record.host == host:
        raise errors.Conflict(f"Server {server} is on host {host} by its record: nothing to adopt.")
    reported = from_wire(HostedServer, answer["facts"])
    _refuse_strange_volumes(store, server, reported.volumes)
    facts = _completed(sources, reported, record, options)
    found = _planned(sources, server, answer, facts, record, options)
    silent = _check_places(sources, found, options)
    for line in described(found, sources, silent):
        print(line)
    if not options.yes:
        print("nothing was written: --yes if that is meant")
        return 1
    limits = sources.quota.source(found.facts.project_id)
    store.write(lambda tx: adoption.adopt(tx, found, limits(tx)))
    print(f"server {server} is on host {host}: openstack server show {server}")
    return 0


@dataclass(frozen=True)
class Record:
    """What the database says of the server. host: "" for none."""

    host: str
    facts: HostedServer

    @classmethod
    def of(cls, tx: Connection, server: str, host: str) -> Record | None:
        """None when there is no such server. Raises Conflict when it was deleted."""
        try:
            row = servers.show(tx, server, deleted=True)
        except errors.NotFound:
            return None
        known = servers.writable_columns(row, ("deleted", "flavor", "image", "interfaces"))
        if known["deleted"]:
            raise adoption.was_deleted(server, host)
        return cls(
            row.host or "",
            HostedServer(
                name=row.name,
                project_id=row.project_id,
                user_id=row.user_id,
                flavor=from_wire(Flavor, known["flavor"]),
                image=from_wire(ImageRef, known["image"]) if known["image"] else None,
                ports={one["port"]: one.get("tag") or "" for one in known["interfaces"] or ()},
            ),
        )


def _refuse_strange_volumes(store: Store, server: str, has: Sequence[str]) -> None:
    """A guest keeps only volumes that its server has a row of: adopted without, it would lose them
    at its next start, and what it boots from with them."""
    rows = store.read(lambda tx: volumes.list_of(tx, server))
    strange = sorted(set(has) - {str(row.volume_id) for row in rows})
    if strange:
        raise errors.Conflict(
            f"The guest has volume {', '.join(strange)}, and the database has lost that. A server is not made of it: "
            "stop the guest, remove it with kilonova host discard, and create a server that boots from the volume "
            "or gets it attached; what is on it stays."
        )


def _completed(
    sources: Sources, facts: HostedServer, record: Record | None, options: argparse.Namespace
) -> HostedServer:
    """What the host remembers, with what the record or the options say in place of what it does
    not."""
    if record is not None:
        given = [f"--{name}" for name in ("name", "project", "user") if getattr(options, name)]
        if given:
            raise errors.BadRequest(
                f"{given[0]}: the database has this server, and its name and owner stay."
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
            f"The host does not remember all of the server. Give {', '.join(missing)}"
            + ("" if facts.image else ", and --image if it is known")
            + "."
        )
    return facts


def _planned(
    sources: Sources,
    server: str,
    answer: JsonObject,
    facts: HostedServer,
    record: Record | None,
    options: argparse.Namespace,
) -> Adoption:
    """What is to be written."""
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
            {**to_wire_interface(one), "tag": facts.ports.get(one.port, "")}
            for one in _in_order(ports or [], facts.ports)
        ],
        None if record is None else record.host,
        options.force,
        sources.default_zone,
    )


def to_wire_interface(interface: Interface) -> JsonObject:
    """As the server's row has it."""
    made = to_wire(interface)
    assert isinstance(made, dict)
    return made


def _in_order(ports: list[Interface], known: Mapping[str, str]) -> list[Interface]:
    """As the guest finds them; those that it does not know at the end."""
    order = {port: number for number, port in enumerate(known)}
    return sorted(ports, key=lambda one: order.get(one.port, len(order)))


def _check_places(sources: Sources, found: Adoption, options: argparse.Namespace) -> list[str]:
    """Has no other host a guest of this server? Returns who did not answer."""
    silent: list[str] = []
    domains = ask_hosts(sources.store, sources.hosts.query, silent)
    others = {
        host: there[found.server]
        for host, there in domains.items()
        if host != found.host and found.server in there
    }
    for host, power_state in sorted(others.items()):
        if host != found.record:
            raise errors.Conflict(
                f"Host {host} has a guest of {found.server} too. See which is the right one, and "
                f"discard the other first: kilonova host discard {host} {found.server}"
            )
        if power_state != states.SHUTDOWN:
            raise errors.Conflict(
                f"The server runs on host {host}, where its record says that it is. If the guest on "
                f"{found.host} is the right one, stop the server first."
            )
        if not options.replace:
            raise errors.Conflict(
                f"Host {host}, which the server's record names, has a guest of it too, which is off. "
                f"To keep that one: kilonova host discard {found.host} {found.server}. To keep the one "
                f"on {found.host}: --replace, and the one on {host} is removed with its disk."
            )
    if found.record and f"host {found.record}" in silent:
        raise errors.Conflict(
            f"Host {found.record}, which the server's record names, does not answer, and may have its "
            "guest: start its kilonova-agent first."
        )
    return silent


def described(found: Adoption, sources: Sources, silent: list[str]) -> list[str]:
    """What will be written, a line each, and what cannot be."""
    facts, flavor = found.facts, found.flavor
    lines = [
        f"server {found.server} ({facts.name}) of project {facts.project_id}, user {facts.user_id}"
        + (f", created {iso(facts.created_at)}" if facts.created_at else ""),
        f"  on host {found.host}, {found.vm_state}"
        + ("" if found.record is None else f"; its record names {found.record or 'no host'}"),
        f"  flavor {flavor.name} ({flavor.id}): {flavor.vcpus} VCPUs, {flavor.memory_mb} MiB, "
        f"{flavor.disk_gb} GiB{_compared(sources, flavor)}",
        f"  image {facts.image.id if facts.image else 'not known'}"
        + (f", key {facts.key_name}" if facts.key_name else ""),
        *(
            f"  port {one['port']} ({one['mac']}) on network {one['network']}"
            for one in found.interfaces
        ),
        *(
            f"  port {port}, which the guest has, is not the server's any more and is left out"
            for port in sorted(set(facts.ports) - {one["port"] for one in found.interfaces})
        ),
        f"  takes {', '.join(f'{amount} {name}' for name, amount in sorted(found.size.items()))} of the host",
    ]
    if found.record is None:
        lines.append(f"  lost, for no host remembers them: {LOST}")
    lines += [f"  {one} did not answer: see that no guest of it is there" for one in sorted(silent)]
    return lines


def _compared(sources: Sources, flavor: Flavor) -> str:
    """Is there such a flavor now?"""
    try:
        now = sources.flavor(flavor.id)
    except errors.NotFound:
        return "; there is no such flavor any more"
    return "" if now == flavor else "; the flavor of this id is another one now"
