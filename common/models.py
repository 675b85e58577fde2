# SPDX-License-Identifier: Apache-2.0
"""The records that cross a process border.

Every process builds and reads these; ``common.wire`` turns them into plain dictionaries and back.
They hold facts, never behaviour that needs I/O. A field added later has a default, so that an older
sender and a newer reader (and the other way round) understand each other.
Units: memory in MiB, disks in GiB, image sizes in bytes, times in microseconds since the epoch
(UTC).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.command_key import CommandKey
from common.command_progress import CommandProgress
from common.json_types import JsonObject


class Control(StrEnum):
    """What can be requested of a live migration that runs."""

    ABORT = "abort"  #: the server stays where it is
    COMPLETE = "complete"  #: it is moved now, also if it stands still meanwhile


@dataclass(frozen=True, slots=True)
class Flavor:
    """The size of a server, frozen into it when it is created or resized. ``number``: of its row in
    the store, by which migrations name it; 0 where nobody looked."""

    id: str
    name: str
    vcpus: int
    memory_mb: int
    root_gb: int
    ephemeral_gb: int = 0
    swap_mb: int = 0
    extra_specs: dict[str, str] = field(default_factory=dict)
    number: int = field(default=0, compare=False)

    @property
    def disk_gb(self) -> int:
        """What the server takes of DISK_GB: root, ephemeral and swap, rounded up."""
        return self.root_gb + self.ephemeral_gb + -(-self.swap_mb // 1024)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as the image service described it when the server was accepted."""

    id: str
    disk_format: str = "qcow2"
    size: int = 0
    hash_algo: str = ""
    hash_value: str = ""
    properties: dict[str, str] = field(default_factory=dict)


#: The vif_type of an interface whose port has ovs_hybrid_plug in its vif_details. Neutron's
#: iptables firewall filters such a port on a Linux bridge that no host makes. In br-int the port
#: would bypass its security groups.
OVS_HYBRID = "ovs_hybrid"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of a server: a port of the network service as it was last described.

    label: the network's name. addresses: dicts with address, version (4 or 6), prefix (length),
    subnet, gateway, dns, routes (of {destination, nexthop}), dhcp (bool), floating (list of
    addresses), and ipv6_mode (slaac …) where the subnet has one. device and bridge: what the host
    calls the interface and what it is plugged into. own: made by Kilonova, so deleted with the
    server; else only unbound. active: wired, as far as the network service says. groups: the names
    of the security groups that guard it; None: not known.
    """

    port: str
    network: str = ""
    label: str = ""
    mac: str = ""
    addresses: list[JsonObject] = field(default_factory=list)
    mtu: int = 0
    tag: str = ""
    own: bool = True
    vif_type: str = ""
    device: str = ""
    bridge: str = ""
    active: bool = False
    groups: list[str] | None = None


@dataclass(frozen=True, slots=True)
class AttachedShare:
    """A share of a server, as its host needs to know it. tag: by which the guest mounts it;
    protocol: NFS;
    export_location: where the host mounts it from."""

    share_id: str
    tag: str
    protocol: str
    export_location: str


@dataclass(frozen=True, slots=True)
class AttachedVolume:
    """A volume of a server, as its host needs to know it. device: how its user calls it, /dev/vdb;
    size_gb: which the host's device must have; connection: what the volume service says for this
    host (driver_volume_type, data), which may hold passwords; bus and device_type: as in block
    device mappings, virtio and disk; multiattach: several guests write to it; name_id: the id
    in the names of its storage, where that is another one, since its data was migrated there."""

    volume_id: str
    device: str
    size_gb: int
    connection: JsonObject = field(default_factory=dict, repr=False)
    boot_index: int | None = None
    bus: str = "virtio"
    device_type: str = "disk"
    tag: str = ""
    read_only: bool = False
    multiattach: bool = False
    name_id: str = ""

    @property
    def stored_id(self) -> str:
        """The id that names it where it is stored."""
        return self.name_id or self.volume_id


@dataclass(frozen=True, slots=True)
class Belongings:
    """The ids of the volumes and shares that a guest may have when it starts. What its host has
    kept for it beside these is not its server's any more: it was detached while the host was
    away. ``needed``: volumes without which it does not start; its host gives it those it lacks."""

    volumes: list[str] = field(default_factory=list)
    shares: list[str] = field(default_factory=list)
    needed: list[AttachedVolume] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of a host. cpus: those that guests share; pcpus: those that a guest can have for
    itself;
    siblings: groups of threads that share a core; pages: size in KiB, as text -> number of pages of
    that size."""

    id: int
    cpus: list[int] = field(default_factory=list)
    pcpus: list[int] = field(default_factory=list)
    memory_mb: int = 0
    siblings: list[list[int]] = field(default_factory=list)
    pages: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Device:
    """A PCI device of a host that guests can have. address: 0000:81:00.1; numbers in four
    hexadecimal digits;
    numa_node: the NUMA node it is near, or -1."""

    address: str
    vendor: str
    product: str
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class AssignedNumaNode:
    """A NUMA node of a guest on a NUMA node of its host. cpus: the guest's CPUs; pins: guest CPU,
    as text -> the host CPU that is its alone (empty: it shares the host NUMA node's). page_kb: 0
    for pages of any kind that need no counting. idle: host CPUs that nobody may have because a
    guest CPU is alone on their core."""

    numa_node: int
    cpus: list[int] = field(default_factory=list)
    pins: dict[str, int] = field(default_factory=dict)
    memory_mb: int = 0
    page_kb: int = 0
    idle: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HardwareAssignment:
    """Which parts of its host a guest has: decided in the claim, kept in its guest record."""

    numa_nodes: list[AssignedNumaNode] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LocalDisk:
    """A disk of a server beside its root disk, which begins empty. name: of its file, ephemeral0,
    ephemeral1 … or swap.
    format: the file system that was asked for; empty: the one that goes with the image's OS."""

    name: str
    size_mb: int
    format: str = ""


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """All that a host needs to make a server's guest: the argument of ``ensure_guest``.

    ``instance`` feeds the config drive: name, hostname, project_id, availability_zone,
    launch_index, meta (dict), keys (list of {name, type, data}), files (list of {path, contents});
    ``user_data`` and ``contents`` are base64 text as the API took it. ``paused``: its CPUs wait
    when it is first started, because the network service has not wired its interfaces yet.
    ``assignment``: which parts of the host are its own. ``disks``: those beside its root disk, in
    the order in which the guest finds them. ``record``: what only its row says, for
    ``server_facts``: user_id, created_at, pinned_availability_zone, disks. ``volumes``: one with
    boot_index 0 takes the place of the root disk. ``shares``: the ids of those that it may have;
    None: a conductor of an earlier release does not say.
    """

    server: str
    fence: int
    name: str
    flavor: Flavor
    image: ImageRef | None = None
    config_drive: bool = False
    user_data: str | None = None
    instance: JsonObject = field(default_factory=dict)
    interfaces: list[Interface] = field(default_factory=list)
    paused: bool = False
    assignment: HardwareAssignment | None = None
    disks: list[LocalDisk] = field(default_factory=list)
    record: JsonObject = field(default_factory=dict)
    volumes: list[AttachedVolume] = field(default_factory=list)
    shares: list[str] | None = None

    @property
    def local_gb(self) -> int:
        """GiB of its disks on its host."""
        boots = any(volume.boot_index == 0 for volume in self.volumes)
        return self.flavor.disk_gb - (self.flavor.root_gb if boots else 0)

    @property
    def belongings(self) -> Belongings | None:
        """What it may have; None: it is not said."""
        if self.shares is None:
            return None
        return Belongings([one.volume_id for one in self.volumes], self.shares)


@dataclass(frozen=True, slots=True)
class DomainState:
    """One domain as a host sees it; ``fence`` is the one written in its metadata."""

    server: str
    power_state: int
    fence: int


@dataclass(frozen=True, slots=True)
class HostInventory:
    """What a host has; reported at registration and on change.

    vcpus: CPUs that guests share; pcpus: those that are given to one guest each. ratios: resource
    class -> allocation ratio, as this host is configured. facts: what filters may ask, among them
    supported_instances (lists of [architecture, hypervisor type, vm mode]).
    """

    hypervisor_type: str
    hypervisor_version: int
    hypervisor_hostname: str
    vcpus: int
    memory_mb: int
    disk_gb: int
    host_ip: str = "127.0.0.1"
    cpu_info: JsonObject = field(default_factory=dict)
    traits: list[str] = field(default_factory=list)
    reserved_memory_mb: int = 0
    reserved_disk_gb: int = 0
    pcpus: int = 0
    ratios: dict[str, float] = field(default_factory=dict)
    numa_nodes: list[NumaNode] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    facts: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Command:
    """One verb for one server on one host, as messages carry it.

    ``common.verbs`` makes commands and reads the verb of a command. A host that cannot read a verb
    refuses this command alone.
    """

    key: CommandKey
    server: str
    #: The host refuses a fence older than the server's newest.
    fence: int
    #: The session of the host that the command is for.
    session: int
    #: Name of the verb.
    verb: str
    #: Arguments of the verb, encoded.
    args: JsonObject = field(default_factory=dict)
    #: Id of the request that began the action, for the log.
    request_id: str = ""


class FailureReason(StrEnum):
    """Why a command failed or was refused, as far as a reader decides by it; ``Result.error`` says
    it to people."""

    UNSPECIFIED = ""
    ABORTED = "aborted"  #: somebody asked for the end of the live migration
    #: the host knows a higher fence, which is in ``Result.known_fence``
    STALE_FENCE = "stale_fence"
    UNKNOWN_VERB = "unknown_verb"  #: the agent is older than the verb
    UNTOUCHED = "untouched"  #: the guest is as it was before the command

    @classmethod
    def _missing_(cls, value: object) -> FailureReason:
        """A reason of a later release."""
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command."""

    #: The text of the command's ``CommandKey``.
    key: str
    server: str
    fence: int
    #: done, failed (definite: nothing of the command runs), refused (the host has not begun it and
    #: is asked again) or unknown (a verb with ``runs_once`` was found begun after a crash).
    status: str
    #: The verb's ``Result``, encoded.
    data: JsonObject = field(default_factory=dict)
    #: Text for tenants.
    error: str = ""
    #: Text for operators.
    details: str = ""
    #: Another host may succeed.
    retryable: bool = False
    reason: FailureReason = FailureReason.UNSPECIFIED
    #: The server's newest fence, where the reason is STALE_FENCE.
    known_fence: int | None = None


@dataclass(frozen=True, slots=True)
class Sync:
    """What an agent says in the one exchange with the conductor.

    ``session`` 0 is registration: it asks for a new session and brings ``inventory``, which comes
    again when it changed. ``metrics`` come with the full report where the host is told to measure.
    ``working`` lists the keys of the commands in hand; ``results`` what is finished and not yet
    acknowledged; ``domains`` the full report when it is not None; ``changed`` single domains that
    an event spoke of; ``phases`` the progress of long commands, by key. ``cached``: what became of
    images that the host was to fetch ahead: image -> "" when it is there, or why not; told until an
    answer comes. ``moved``: how far live migrations are, by key. ``ask`` is true for the periodic
    exchange, which is answered with what the host should be doing. ``number`` rises with each
    exchange of a session, so that what an older one tells of the host's state is not taken for
    news; 0: an agent that counts none.
    ``cookie``: the last that a conductor gave, which shows that this is said now. ``files``:
    servers of which the host has files and no domain; None: as it told before in this session.
    Of many a page at a time: those after the first of ``files_between`` and up to the second
    (empty: to the end); None: these are all.
    """

    host: str
    session: int
    boot_id: str = ""
    ask: bool = True
    working: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    domains: list[DomainState] | None = None
    changed: list[DomainState] = field(default_factory=list)
    inventory: HostInventory | None = None
    metrics: dict[str, float] | None = None
    phases: dict[str, CommandProgress] = field(default_factory=dict)
    cached: dict[str, str] = field(default_factory=dict)
    moved: dict[str, dict[str, int]] = field(default_factory=dict)
    number: int = 0
    cookie: str = ""
    files: list[str] | None = None
    files_between: list[str] | None = None

    @property
    def tells_state(self) -> bool:
        """Does it tell something of the host that a later exchange may have told otherwise?"""
        return bool(
            self.domains is not None
            or self.changed
            or self.inventory
            or self.metrics
            or self.cached
            or self.files is not None
        )


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What an idle host says in place of a ``Sync``: nothing to tell, nothing in hand. It asks
    whether something waits for it. ``domains``: another text when its domains, or their states or
    fences, are not what they were."""

    host: str
    session: int
    domains: str = ""
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """Does ``nothing`` wait for the host? Else it is to sync, with all its domains. ``cookie``: as
    in SyncAnswer."""

    nothing: bool
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """The conductor's half: the session in force (0: register again), the result keys it has heard
    (the command of one that it could not write down comes again), the commands and debts that the
    host does not seem to know of, and fences that it should know: all guests' at registration, else
    those of domains that it told of under an older one.
    ``stop``, at registration: servers whose domain here must be off, because they are or may be
    elsewhere. ``cookie``: what the host says next is to bring it; good for a minute."""

    session: int
    acknowledged: list[str] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    guests: dict[str, int] | None = None
    stop: list[str] = field(default_factory=list)
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """What opens images for a host: the image gateway's URL and a ticket
    (``common.image_tickets``), made for the message. Never journalled, never printed."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What is wanted of placement for one server.

    force_host: this host, whatever the filters of the operator say; requested_host: this one, if
    they let it.
    group: the server group whose policy counts. traits: those a host must have, and must not have.
    excluded: hosts that may not be. debts: those of them that still have an old guest of it.
    is_rebuild: the server is on requested_host already and only its image changes. holds: what it
    has on the host holds_on, which may become its place once more: there it needs only what it
    wants more.
    """

    server: str
    project_id: str
    resources: dict[str, int]
    flavor: Flavor | None = None
    image_id: str | None = None
    image_properties: dict[str, str] = field(default_factory=dict)
    required_traits: list[str] = field(default_factory=list)
    forbidden_traits: list[str] = field(default_factory=list)
    availability_zone: str | None = None
    force_host: str | None = None
    requested_host: str | None = None
    excluded: list[str] = field(default_factory=list)
    debts: list[str] = field(default_factory=list)
    hints: JsonObject = field(default_factory=dict)
    group: str | None = None
    is_rebuild: bool = False
    holds: dict[str, int] = field(default_factory=dict)
    holds_on: str | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The scheduler's proposal: hosts in order of preference; why each of the others was left out.

    ``reason`` is a sentence with the number of hosts that each filter removed, safe for tenants;
    ``by_host`` names each rejected host with its reason, for admins; ``zones`` is the availability
    zone of each proposed host.
    """

    server: str
    hosts: list[str]
    reason: str = ""
    by_host: dict[str, str] = field(default_factory=dict)
    zones: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would become of a request, asked without making anything.

    hosts: the best first, at most ten. room: availability zone -> how many such servers fit there.
    removed: for each check how many hosts it was the first to refuse, and its text. reason and
    by_host as in ``Selection``.
    """

    total: int
    passing: int
    hosts: list[str] = field(default_factory=list)
    room: dict[str, int] = field(default_factory=dict)
    removed: list[JsonObject] = field(default_factory=list)
    reason: str = ""
    by_host: dict[str, str] = field(default_factory=dict)
