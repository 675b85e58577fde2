# SPDX-License-Identifier: Apache-2.0
"""The records that cross a process border.

Every process builds and reads these records. ``common.domain.wire`` turns them into plain
dictionaries and back. They hold facts, never behaviour that needs I/O. A field added later has a
default, so that processes of two releases understand each other.

Units: memory in MiB, disks in GiB, image sizes in bytes, times in microseconds since the epoch
(UTC).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.domain.command_key import CommandKey
from common.domain.command_progress import CommandProgress
from common.domain.json_types import JsonObject


class Control(StrEnum):
    """A request of a user about a running live migration."""

    ABORT = "abort"  #: Cancel the migration. The server stays on the source.
    COMPLETE = "complete"  #: Complete the migration now, even if the server must pause meanwhile.


@dataclass(frozen=True, slots=True)
class Flavor:
    """The size of a server, frozen into the server at its creation and at a resize."""

    id: str
    name: str
    vcpus: int
    #: MiB of memory.
    memory_mb: int
    #: GiB of the root disk.
    root_gb: int
    #: GiB of the ephemeral disks together.
    ephemeral_gb: int = 0
    #: MiB of the swap disk.
    swap_mb: int = 0
    extra_specs: dict[str, str] = field(default_factory=dict)
    #: The number of the flavor's row, which migrations show. 0: not looked up.
    number: int = field(default=0, compare=False)

    @property
    def disk_gb(self) -> int:
        """GiB of the root, ephemeral and swap disks together, rounded up to whole GiB."""
        return self.root_gb + self.ephemeral_gb + -(-self.swap_mb // 1024)


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as the image service described it when the server was accepted."""

    id: str
    #: raw, qcow2 and so on.
    disk_format: str = "qcow2"
    #: Bytes of the image.
    size: int = 0
    #: The algorithm of ``hash_value``, for example sha512.
    hash_algo: str = ""
    #: The hash of the image's bytes, hexadecimal.
    hash_value: str = ""
    properties: dict[str, str] = field(default_factory=dict)


#: The vif_type of an interface whose port has ovs_hybrid_plug in its vif_details. Neutron's
#: iptables firewall filters such a port on a Linux bridge that no host makes. In br-int the port
#: would bypass its security groups.
OVS_HYBRID = "ovs_hybrid"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface of a server: a port of the network service as last described."""

    #: The id of the port.
    port: str
    #: The id of the network.
    network: str = ""
    #: The name of the network.
    label: str = ""
    mac: str = ""
    #: Dictionaries with address, version (4 or 6), prefix (length), subnet, gateway, dns, routes
    #: (of {destination, nexthop}), dhcp (bool), floating (list of addresses), and ipv6_mode (for
    #: example slaac) where the subnet has a mode.
    addresses: list[JsonObject] = field(default_factory=list)
    mtu: int = 0
    #: The tag by which the guest finds the interface.
    tag: str = ""
    #: True if Kilonova made the port. Other ports are only unbound when the server is deleted.
    own: bool = True
    #: How the host plugs the interface in, as the network service decides.
    vif_type: str = ""
    #: The host's device of the interface.
    device: str = ""
    #: The bridge of the host into which ``device`` is plugged.
    bridge: str = ""
    #: True if the network service has wired the port.
    active: bool = False
    #: The names of the port's security groups. None: unknown.
    groups: list[str] | None = None


@dataclass(frozen=True, slots=True)
class AttachedShare:
    """A share of a server, for the server's host."""

    share_id: str
    #: The tag by which the guest mounts the share.
    tag: str
    #: The protocol of the share: NFS.
    protocol: str
    #: Where the host mounts the share from.
    export_location: str


@dataclass(frozen=True, slots=True)
class AttachedVolume:
    """A volume of a server, for the server's host."""

    volume_id: str
    #: The name of the device for the user, for example /dev/vdb.
    device: str
    #: GiB that the host's device must have.
    size_gb: int
    #: The volume service's connection for this host (driver_volume_type, data). It may contain
    #: passwords.
    connection: JsonObject = field(default_factory=dict, repr=False)
    #: 0: the guest boots from the volume. None: the volume is no boot device.
    boot_index: int | None = None
    #: disk_bus of the block device mapping.
    bus: str = "virtio"
    #: device_type of the block device mapping.
    device_type: str = "disk"
    #: The tag by which the guest finds the volume.
    tag: str = ""
    read_only: bool = False
    #: True if several guests may write to the volume.
    multiattach: bool = False
    #: The id in the names of the volume's storage, if the data was migrated there. Empty:
    #: ``volume_id``.
    name_id: str = ""

    @property
    def stored_id(self) -> str:
        """The id by which the storage backend names the volume: ``name_id``, else ``volume_id``."""
        return self.name_id or self.volume_id


@dataclass(frozen=True, slots=True)
class Belongings:
    """The volumes and shares that a guest may have at a start.

    The host removes all others, which were detached while the host was away.
    """

    #: The ids of the volumes.
    volumes: list[str] = field(default_factory=list)
    #: The ids of the shares.
    shares: list[str] = field(default_factory=list)
    #: Volumes without which the guest does not start. The host attaches those that are missing.
    needed: list[AttachedVolume] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of a host."""

    id: int
    #: CPUs that guests share.
    cpus: list[int] = field(default_factory=list)
    #: CPUs that a guest can have for itself.
    pcpus: list[int] = field(default_factory=list)
    memory_mb: int = 0
    #: Groups of threads that share a core.
    siblings: list[list[int]] = field(default_factory=list)
    #: The number of pages of each size. Keys are KiB as text.
    pages: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Device:
    """A PCI device of a host that guests can have."""

    #: For example 0000:81:00.1.
    address: str
    #: Four hexadecimal digits.
    vendor: str
    #: Four hexadecimal digits.
    product: str
    #: The nearest NUMA node, or -1.
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class AssignedNumaNode:
    """A NUMA node of a guest on a NUMA node of its host."""

    #: The NUMA node of the host.
    numa_node: int
    #: The guest's CPUs.
    cpus: list[int] = field(default_factory=list)
    #: The host CPU of each dedicated guest CPU, by the guest CPU as text. Empty: the guest shares
    #: the CPUs of the host's NUMA node.
    pins: dict[str, int] = field(default_factory=dict)
    memory_mb: int = 0
    #: KiB of a page. 0: pages of any size, which are not counted.
    page_kb: int = 0
    #: Host CPUs that stay idle because a guest CPU has their core to itself.
    idle: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HardwareAssignment:
    """The parts of a host that a guest has: decided by the claim, stored in the guest record."""

    numa_nodes: list[AssignedNumaNode] = field(default_factory=list)
    #: The addresses of PCI devices.
    devices: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LocalDisk:
    """An empty disk of a server beside its root disk."""

    #: The name of the disk's file: ephemeral0, ephemeral1 and so on, or swap.
    name: str
    size_mb: int
    #: The requested file system. Empty: the usual file system of the image's operating system.
    format: str = ""


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """The description of a server's guest for its host: the argument of each ``GuestVerb``."""

    #: The id of the server.
    server: str
    fence: int
    name: str
    flavor: Flavor
    image: ImageRef | None = None
    #: True if the guest gets a config drive.
    config_drive: bool = False
    #: Base64 text, as the API received it.
    user_data: str | None = None
    #: Facts for the config drive: name, hostname, project_id, availability_zone, launch_index, meta
    #: (dict), keys (list of {name, type, data}), files (list of {path, contents}). ``contents`` is
    #: base64 text, as the API received it.
    instance: JsonObject = field(default_factory=dict)
    interfaces: list[Interface] = field(default_factory=list)
    #: True if the CPUs wait at the first start, because the network service has not wired the
    #: interfaces yet.
    paused: bool = False
    #: The parts of the host that the guest has to itself.
    assignment: HardwareAssignment | None = None
    #: Disks beside the root disk, in the order in which the guest finds them.
    disks: list[LocalDisk] = field(default_factory=list)
    #: Facts of the server's row for ``server_facts``: user_id, created_at,
    #: pinned_availability_zone, disks.
    record: JsonObject = field(default_factory=dict)
    #: A volume with boot_index 0 takes the place of the root disk.
    volumes: list[AttachedVolume] = field(default_factory=list)
    shares: list[str] = field(default_factory=list)

    @property
    def local_gb(self) -> int:
        """GiB of the flavor's disks, without the root disk if the guest boots from a volume."""
        boots = any(volume.boot_index == 0 for volume in self.volumes)
        return self.flavor.disk_gb - (self.flavor.root_gb if boots else 0)

    @property
    def belongings(self) -> Belongings:
        """The ids of all volumes and shares of the guest, with ``Belongings.needed`` empty."""
        return Belongings([volume.volume_id for volume in self.volumes], self.shares)


@dataclass(frozen=True, slots=True)
class DomainState:
    """A domain as reported by a host."""

    server: str
    #: One of the power states of ``common.domain.states``.
    power_state: int
    #: The fence in the domain's metadata.
    fence: int


@dataclass(frozen=True, slots=True)
class HostInventory:
    """The resources of a host, reported at registration and on change."""

    hypervisor_type: str
    hypervisor_version: int
    #: The name of the host in Placement and in the API's hypervisors.
    hypervisor_hostname: str
    #: CPUs that guests share.
    vcpus: int
    memory_mb: int
    disk_gb: int
    #: The address of the host.
    host_ip: str = "127.0.0.1"
    #: vendor, model, topology and features, as the API shows them.
    cpu_info: JsonObject = field(default_factory=dict)
    #: The names of traits.
    traits: list[str] = field(default_factory=list)
    #: MiB of memory that guests cannot have.
    reserved_memory_mb: int = 0
    #: GiB of disk that guests cannot have.
    reserved_disk_gb: int = 0
    #: CPUs that are given to one guest each.
    pcpus: int = 0
    #: The allocation ratio of each resource class, as the host is configured.
    ratios: dict[str, float] = field(default_factory=dict)
    numa_nodes: list[NumaNode] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    #: Facts for filters, among them supported_instances (lists of [architecture, hypervisor type,
    #: vm mode]).
    facts: JsonObject = field(default_factory=dict)
    #: The version of the agent's code. Agents of 0.1.0 do not send theirs.
    version: str = "0.1.0"


@dataclass(frozen=True, slots=True)
class Command:
    """One verb for one server on one host, as messages carry it.

    ``common.domain.verbs`` makes commands and reads the verb of a command. A host that cannot read
    a verb refuses this command alone.
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
    """The reason of a failed or refused command, for code.

    ``Result.error`` is the text for people.
    """

    UNSPECIFIED = ""
    ABORTED = "aborted"  #: A user aborted the live migration.
    #: The host knows a higher fence, which is in ``Result.known_fence``.
    STALE_FENCE = "stale_fence"
    UNKNOWN_VERB = "unknown_verb"  #: The agent's release does not have the verb.
    UNTOUCHED = "untouched"  #: The guest is unchanged.

    @classmethod
    def _missing_(cls, value: object) -> FailureReason:
        """Return UNSPECIFIED for an unknown value, for example a reason of a later release."""
        return cls.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a command."""

    #: The text of the command's ``CommandKey``.
    key: str
    server: str
    fence: int
    #: done, failed (definite: no part of the command runs), refused (the host has not begun the
    #: command, and the conductor sends it again) or unknown (a crash interrupted a verb with
    #: ``runs_once``).
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
    """A report of an agent to a conductor, see ``conductor.engine.reports``."""

    host: str
    #: The host's session. 0: registration, which requests a new session and has ``inventory``.
    session: int
    #: The boot of the host.
    boot_id: str = ""
    #: True for the periodic exchange: the host requests the commands that it lacks.
    ask: bool = True
    #: The keys of the commands in hand.
    working: list[str] = field(default_factory=list)
    #: Results that no conductor has acknowledged yet.
    results: list[Result] = field(default_factory=list)
    #: All domains of the host. None: not reported.
    domains: list[DomainState] | None = None
    #: Domains of which the hypervisor has reported an event.
    changed: list[DomainState] = field(default_factory=list)
    #: The resources of the host, at registration and on change.
    inventory: HostInventory | None = None
    #: Measurements, with the full report of a host that is configured to measure.
    metrics: dict[str, float] | None = None
    #: The progress of long commands, by key.
    phases: dict[str, CommandProgress] = field(default_factory=dict)
    #: For each image that the host fetches ahead: "" if the image is there, or the reason why not.
    #: Repeated until an answer comes.
    cached: dict[str, str] = field(default_factory=dict)
    #: The progress of live migrations, by key.
    moved: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Rises with each exchange of a session, so that conductors ignore the state of the host in an
    #: older exchange. 0: the agent does not count.
    number: int = 0
    #: The last cookie from a conductor, which proves that the report is new.
    cookie: str = ""
    #: Servers of which the host has files and no domain. None: unchanged in this session.
    files: list[str] | None = None
    #: The bounds of a page of ``files``: those after the first text and up to the second (empty: to
    #: the end). None: ``files`` is complete.
    files_between: list[str] | None = None

    @property
    def tells_state(self) -> bool:
        """True if the report has state of the host that a newer report replaces.

        State is the domains, changed domains, inventory, metrics, prefetched images and files.
        Results and the progress of commands are no such state.
        """
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
    """The message of an idle host in place of a ``Sync``: no news, and a request for work."""

    host: str
    session: int
    #: A digest of the host's domains with their states and fences.
    domains: str = ""
    #: As in ``Sync``.
    cookie: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The answer to a ``Heartbeat``."""

    #: True if there is no work for the host. Otherwise the host sends a ``Sync`` with all domains.
    nothing: bool
    #: As in ``SyncAnswer``.
    cookie: str = ""
    #: As in ``SyncAnswer``.
    secrets: str = ""


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """The answer of a conductor to a ``Sync``."""

    #: The session in force. 0: the host has to register again.
    session: int
    #: The keys of the results that the conductor has processed. If it could not store a result, it
    #: sends the command again.
    acknowledged: list[str] = field(default_factory=list)
    #: Commands and removals of guests that the host does not seem to know.
    commands: list[Command] = field(default_factory=list)
    #: Fences that the host should know: of all guests at registration, otherwise of domains that it
    #: reported under an older fence.
    guests: dict[str, int] | None = None
    #: At registration: servers whose domain on this host must be off, because they are or may be on
    #: another host.
    stop: list[str] = field(default_factory=list)
    #: The cookie for the next message of the host, valid for 90 to 120 seconds.
    cookie: str = ""
    #: The digest of the host's secrets today (``HostSecrets.digest``). A host with another digest
    #: fetches the secrets. Empty: unknown.
    secrets: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """The access to images that a host gets with one message. Never journalled or printed."""

    #: The URL of the image gateway.
    url: str
    #: A ticket, see ``common.security.image_tickets``.
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The requirements of one server for its placement."""

    #: The id of the server.
    server: str
    project_id: str
    #: The amount of each resource class.
    resources: dict[str, int]
    flavor: Flavor | None = None
    image_id: str | None = None
    image_properties: dict[str, str] = field(default_factory=dict)
    #: Traits that the host must have.
    required_traits: list[str] = field(default_factory=list)
    #: Traits that the host must not have.
    forbidden_traits: list[str] = field(default_factory=list)
    availability_zone: str | None = None
    #: The host of the server, even if the operator's filters reject it.
    force_host: str | None = None
    #: The host of the server, if the operator's filters pass it.
    requested_host: str | None = None
    #: Hosts that are no candidates.
    excluded: list[str] = field(default_factory=list)
    #: Hosts of ``excluded`` that still have an old guest of the server.
    hosts_with_removals: list[str] = field(default_factory=list)
    #: The scheduler hints of the request.
    hints: JsonObject = field(default_factory=dict)
    #: The server group whose policy applies.
    group: str | None = None
    #: True if the server is on ``requested_host`` and only its image changes.
    is_rebuild: bool = False
    #: Resources that the server already holds on ``holds_on``, where only the difference is needed.
    holds: dict[str, int] = field(default_factory=dict)
    #: The host that may become the place of the server once more.
    holds_on: str | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The scheduler's proposal for one server."""

    #: The id of the server.
    server: str
    #: Hosts in order of preference.
    hosts: list[str]
    #: A sentence with the number of hosts that each filter removed, safe for tenants.
    reason: str = ""
    #: The reason for each rejected host, for admins.
    by_host: dict[str, str] = field(default_factory=dict)
    #: The availability zone of each proposed host.
    zones: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The scheduler's answer to an explain request: which hosts could take a server."""

    #: The number of hosts.
    total: int
    #: The number of hosts that pass all filters.
    passing: int
    #: The best hosts first, at most ten.
    hosts: list[str] = field(default_factory=list)
    #: How many such servers fit into each availability zone.
    room: dict[str, int] = field(default_factory=dict)
    #: For each filter: the number of hosts that it was the first to refuse, and its text.
    removed: list[JsonObject] = field(default_factory=list)
    #: As in ``Selection``.
    reason: str = ""
    #: As in ``Selection``.
    by_host: dict[str, str] = field(default_factory=dict)
