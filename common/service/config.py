# SPDX-License-Identifier: Apache-2.0
"""Every option, in one place: few, with safe defaults.

``load`` reads one file (``kilonova.conf``) into oslo.config's global object, because oslo.messaging
works only with that object. A wrong value is refused at start, with the option and the allowed
values. ``kilonova config sample`` generates the sample in deploy/ from this list.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from oslo_config import cfg, types

from common.domain.errors import ConfigError
from common.domain.json_types import JsonObject
from common.service import config_file
from common.service import host_options as hosts
from common.service import notification_options as notifications
from common.service.credentials import CredentialSource
from common.service.host_options import like
from common.service.pci_aliases import PciAliases

CONF = cfg.CONF
#: The file of each process. The agent shares none with the control plane.
DEFAULT_FILE, AGENT_FILE = "/etc/kilonova/kilonova.conf", "/etc/kilonova/agent.conf"
AGENT = "agent"
#: Data that must survive a restart: the StateDirectory of the process's unit.
STATE, AGENT_STATE = "/var/lib/kilonova", "/var/lib/kilonova-agent"


def _url(schemes: tuple[str, ...]) -> types.ConfigType:
    class Url(types.String):
        def __call__(self, value: object) -> str:
            text = str(super().__call__(value))
            if not text.startswith(schemes):
                raise ValueError(f"must start with one of {', '.join(schemes)}")
            return text

    return Url(max_length=2048)


_DATABASES = ("sqlite:///", "postgresql+psycopg://", "mysql+pymysql://", "mysql+mysqldb://")

# fmt: off
OPTIONS: dict[str, Sequence[cfg.Opt]] = {
    "DEFAULT": (
        cfg.HostAddressOpt("host", default=socket.gethostname(), sample_default="the host's name",
                           help="Name of this host in the cloud; it must never change."),
        cfg.HostAddressOpt("my_ip", default="127.0.0.1",
                           help="Address of a controller at which hosts and other controllers reach it: what metadata "
                                "service and image gateway listen on, where their sections say nothing else."),
        cfg.StrOpt("state_dir", default=STATE,
                   help="Folder for what must survive a restart: journal, guests' disks, image cache; default of an "
                        f"agent: {AGENT_STATE}."),
        cfg.StrOpt("secret_key", default="", secret=True,
                   help="Keeps passwords and user data in the database unreadable and signs what opens images for "
                        "hosts; any long random text, the same for all processes but agents. Several, separated by "
                        "commas: the first is used, all are understood."),
        cfg.IntOpt("reclaim_instance_interval", default=0, min=0,
                   help="Seconds that a deleted server can be restored; 0: it is deleted at once."),
        cfg.IntOpt("shelved_offload_time", default=0, min=-1,
                   help="Seconds after which a shelved server leaves its host; 0: at once; -1: never by itself."),
        cfg.IntOpt("max_local_block_devices", default=3, min=1, max=10, help="Most disks of a server on its host."),
        cfg.StrOpt("default_ephemeral_format", default="", choices=["", "ext2", "ext3", "ext4", "xfs", "vfat", "ntfs"],
                   help="File system of ephemeral disks; empty: ext4 for Linux, ntfs for Windows, vfat for others."),
        *notifications.AUDIT,
        cfg.StrOpt("log_level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"],
                   help="Least severity that is logged."),
    ),
    "log": (
        cfg.StrOpt("format", default="text", choices=["text", "json"],
                   help="Form of the log's lines, on standard error: for people, or one JSON object each."),
    ),
    "prometheus": (
        cfg.BoolOpt("enabled", default=False, help="Whether processes count what they do, and Prometheus may read it."),
        cfg.HostAddressOpt("host", default="127.0.0.1",
                           help="Address on which each process lets its metrics be read, without a password and in "
                                "plain text: on another than loopback, let only Prometheus reach the ports."),
        cfg.PortOpt("api_port", default=9174, help="Port of api processes' metrics; 0: they have none."),
        cfg.PortOpt("conductor_port", default=9175, help="Port of conductor processes' metrics; 0: they have none."),
        cfg.PortOpt("scheduler_port", default=9176, help="Port of scheduler processes' metrics; 0: they have none."),
        cfg.PortOpt("agent_port", default=9177, help="Port of agent processes' metrics; 0: they have none."),
        cfg.PortOpt("placement_port", default=9178, help="Port of placement processes' metrics; 0: they have none."),
        cfg.PortOpt("metadata_port", default=9179, help="Port of metadata processes' metrics; 0: they have none."),
        cfg.PortOpt("console_port", default=9180, help="Port of console processes' metrics; 0: they have none."),
        cfg.PortOpt("image_gateway_port", default=9181,
                    help="Port of image gateway processes' metrics; 0: they have none."),
        cfg.IntOpt("port_step", default=100, min=0, max=1000,
                   help="A second process of a kind on one machine, which finds that port taken, lets its metrics be "
                        "read at a port so much higher, a third twice as much; its log says at which. 0: nowhere."),
    ),
    "tracing": (
        cfg.BoolOpt("enabled", default=False,
                    help="Whether spans of requests, actions, steps and commands are sent to a collector of "
                         "OpenTelemetry. Needs the extra tracing: pip install 'kilonova[tracing]'."),
        cfg.Opt("endpoint", type=_url(("http://", "https://")), default="http://127.0.0.1:4318/v1/traces",
                help="URL that takes them as OTLP over HTTP. More, as headers: OpenTelemetry's own variables in the "
                     "unit's environment, OTEL_EXPORTER_OTLP_HEADERS."),
        cfg.FloatOpt("sample_ratio", default=1.0, min=0, max=1,
                     help="Which part of all requests is traced; the same for all processes and hosts."),
    ),
    "database": (
        cfg.Opt("url", type=_url(_DATABASES), default="sqlite:////var/lib/kilonova/kilonova.db", secret=True,
                help="SQLAlchemy URL of the database. SQLite is for one machine."),
        cfg.BoolOpt("tls", default=True,
                    help="Whether connections to the server use TLS when [tls] ca_file is set; false: for a server on "
                         "this machine."),
        cfg.IntOpt("connect_timeout", default=5, min=1, max=60,
                   help="Seconds to reach the server, or to wait for one of the process's connections. With a proxy or "
                        "several addresses in front, what one of them takes to fail over must fit."),
        cfg.IntOpt("lock_timeout", default=3, min=1, max=60,
                   help="Seconds that a statement waits for rows that another transaction holds. What waited in vain "
                        "is tried again for 9 seconds; then requests are answered 503, and conductors come back later. "
                        "Less than half of statement_timeout."),
        cfg.IntOpt("statement_timeout", default=10, min=1, max=600,
                   help="Seconds that one statement may take. A server that has said nothing for 2 seconds longer "
                        "counts as dead: the connection is given up. Upgrades and the doctor may take any time."),
        cfg.IntOpt("idle_transaction_timeout", default=10, min=1, max=600,
                   help="Seconds after which the server ends a transaction whose client has fallen silent, and frees "
                        "the rows that it held: what a machine that dies in the middle costs the others."),
    ),
    "tls": (
        cfg.StrOpt("ca_file", default="",
                   help="PEM file with the authorities that sign the certificates of broker, database and Kilonova's "
                        "processes. When set, all connections between these use TLS, and certificates and names are "
                        "verified; they never fall back to plain text."),
        cfg.StrOpt("cert_file", default="",
                   help="PEM file with this process's certificate: for the names and addresses at which others reach "
                        "it. Agents, metadata service, image gateway and console service need one."),
        cfg.StrOpt("key_file", default="", help="PEM file with its key, without a password; default: cert_file."),
        cfg.StrOpt("ca_key_file", default="",
                   help="On conductors' machines alone: PEM file with the key of the authority in ca_file. When set, "
                        "a host that joins gets its certificate with its keys; else it brings its own."),
        cfg.BoolOpt("allow_plain_text", default=False,
                    help="Whether connections to other machines may be plain text where TLS is not set up; otherwise "
                         "that is refused at start. Loopback addresses need neither."),
    ),
    "api": (
        cfg.HostAddressOpt("host", default="127.0.0.1", help="Address that the API listens on."),
        cfg.PortOpt("port", default=8774, help="Port of the API."),
        cfg.IntOpt("workers", default=1, min=1, max=64, help="Processes of the API."),
        cfg.IntOpt("threads", default=16, min=1, max=64,
                   help="Threads of each API process; requests to one server have four times as many beside these. "
                        "One project has at most half of them for changes, and an eighth for reads."),
        cfg.IntOpt("max_limit", default=1000, min=1, max=10000, help="Most items that one list returns."),
        cfg.IntOpt("max_body", default=1024 * 1024, min=1024,
                   help="Largest request body, in bytes; 65536 where no request needs more."),
        cfg.StrOpt("public_url", help="URL that links in answers start with; default: as the client asked."),
        cfg.StrOpt("policy_file",
                   help="oslo.policy file that overrides the defaults, in Nova's rule names; read again when it "
                        "changes."),
        cfg.Opt("pci_alias", type=PciAliases(), default={}, sample_default="[]",
                help="What flavors call PCI devices in pci_passthrough:alias, as a JSON list of "
                     '{"name": "gpu", "vendor_id": "10de", "product_id": "1db4"}.'),
    ),
    "http": (
        cfg.IntOpt("connections", default=4000, min=64, max=60_000,
                   help="Most connections of clients to one process of API, metadata or placement service, or image "
                        "gateway. One more takes the place of the one that has waited longest, of the address that "
                        "has the most."),
        cfg.IntOpt("connections_per_address", default=500, min=1,
                   help="The same for one address (of IPv6: one /64). More behind a proxy: it is one address."),
        cfg.IntOpt("head_seconds", default=10, min=1, help="Seconds that a request's line and headers may take."),
        cfg.IntOpt("stall_timeout_seconds", deprecated_name="patience_seconds", default=10, min=1,
                   help="Seconds that a body may take to come and an answer to be taken, beside one for each 16 KiB."),
        cfg.IntOpt("idle_seconds", default=75, min=1, help="Seconds that a connection stays open between requests."),
    ),
    "oslo_middleware": (
        cfg.BoolOpt("enable_proxy_headers_parsing", default=False,
                    help="Whether HTTP services believe Forwarded, X-Forwarded-Proto, -Host, -For and -Prefix, of "
                         "which links are made: only where every request comes through a proxy that sets them anew."),
    ),
    "conductor": (
        cfg.IntOpt("batch", default=64, min=1, max=1000, help="Most actions advanced in one transaction."),
        cfg.IntOpt("max_attempts", default=3, min=1, max=20, help="Hosts that a create is tried on."),
        cfg.IntOpt("host_silence", default=30, min=10, max=600,
                   help="Seconds without a sign of life after which a host counts as down."),
        cfg.IntOpt("resize_confirm_window", default=0, min=0,
                   help="Seconds after which a resize that nobody confirmed or reverted is confirmed; 0: never."),
        cfg.BoolOpt("allow_resize_to_same_host", default=False, help="Whether a resize may stay on its host."),
        cfg.StrOpt("fencing_hook", default="",
                   help="Program that makes sure that the guests of a host are dead: it gets the host's name, and ends "
                        "with 0 only when they are. Without it a silent host is evacuated only when it was forced "
                        "down."),
        cfg.IntOpt("fencing_timeout", default=120, min=1, max=3600, help="Seconds that the fencing hook may take."),
    ),
    "host_keys": (
        cfg.StrOpt("command_secret", default="", secret=True,
                   help="Makes the keys that prove commands and reports; any long random text, the same for all "
                        "conductors, and on no other machine. When it changes, every host needs: kilonova host "
                        "rotate."),
        cfg.StrOpt("query_secret", default="", secret=True,
                   help="Makes the keys that prove questions to hosts, as for a console; any long random text, the "
                        "same for all API, console and conductor processes, and on no host."),
        cfg.Opt("management_url", type=_url(("http://", "https://")), secret=True,
                help="RabbitMQ's management, with an administrator's name and password, for kilonova host add, rotate "
                     "and remove; default: they print what is to be done at the broker."),
    ),
    "ha": (
        cfg.BoolOpt("evacuate", default=False,
                    help="Whether the servers of a host that went down are evacuated without anybody's word. Needs "
                         "[conductor] fencing_hook, which is called first."),
        cfg.IntOpt("after", default=60, min=10, help="Seconds for which the host must have been silent."),
        cfg.IntOpt("max_hosts", default=1, min=1,
                   help="The most hosts with servers that may be down: with more of them nothing is evacuated, because "
                        "a network is then likelier to be broken than so many hosts."),
    ),
    "scheduler": (
        cfg.ListOpt("enabled_filters",
                    default=["ComputeFilter", "ComputeCapabilitiesFilter", "ImagePropertiesFilter",
                             "ServerGroupAntiAffinityFilter", "ServerGroupAffinityFilter"],
                    help="Filters, in order: Nova's, and those that installed distributions bring. Zones, traits, "
                         "resources, server groups, NUMA nodes and PCI devices are always checked."),
        cfg.IntOpt("max_instances_per_host", default=50, min=1,
                   help="Servers of a host, for NumInstancesFilter; AggregateNumInstancesFilter has it where metadata "
                        "says nothing."),
        cfg.IntOpt("max_io_ops_per_host", default=8, min=0,
                   help="Servers being built, copied or moved on a host, for IoOpsFilter and AggregateIoOpsFilter."),
        cfg.StrOpt("image_properties_default_architecture",
                   choices=["aarch64", "armv7l", "i686", "ppc64", "ppc64le", "riscv64", "s390x", "x86_64"],
                   help="Architecture of images that do not say theirs, for ImagePropertiesFilter; default: any."),
        cfg.ListOpt("isolated_images", default=[],
                    help="Ids of images that run on isolated_hosts only, for IsolatedHostsFilter."),
        cfg.ListOpt("isolated_hosts", default=[], help="Names of the hosts that are kept for isolated_images."),
        cfg.BoolOpt("restrict_isolated_hosts_to_isolated_images", default=True,
                    help="Whether nothing else runs on isolated_hosts."),
        cfg.StrOpt("aggregate_image_properties_isolation_namespace",
                   help="Metadata that AggregateImagePropertiesIsolation compares begins with it and the separator; "
                        "default: all is compared."),
        cfg.StrOpt("aggregate_image_properties_isolation_separator", default=".", help="What ends the namespace."),
        cfg.IntOpt("build_failure_limit", default=5, min=0,
                   help="Builds that fail in a row before a host is left out for a while; 0: never."),
        cfg.IntOpt("build_failure_pause", default=300, min=1,
                   help="Seconds that it is left out, before it is tried with one server."),
        cfg.ListOpt("enabled_weighers", default=[
            "RAMWeigher", "CPUWeigher", "DiskWeigher", "MetricsWeigher", "IoOpsWeigher", "PCIWeigher",
            "ServerGroupSoftAffinityWeigher", "ServerGroupSoftAntiAffinityWeigher", "BuildFailureWeigher",
            "HypervisorVersionWeigher", "NumInstancesWeigher", "ImagePropertiesWeigher"],
                    help="Weighers: Nova's, and those that installed distributions bring. A multiplier may stand in "
                         "the metadata of aggregates too; of several the smallest counts."),
        cfg.FloatOpt("ram_weight_multiplier", default=1.0, help="Weight of free memory; negative: stack."),
        cfg.FloatOpt("cpu_weight_multiplier", default=1.0, help="Weight of free VCPUs; negative: stack."),
        cfg.FloatOpt("disk_weight_multiplier", default=1.0, help="Weight of free disk; negative: stack."),
        cfg.FloatOpt("io_ops_weight_multiplier", default=-1.0,
                     help="Weight of servers being built, copied or moved on a host; negative: prefer quiet hosts."),
        cfg.FloatOpt("pci_weight_multiplier", default=1.0, min=0.0,
                     help="Weight of keeping hosts with many free PCI devices for servers that want many."),
        cfg.FloatOpt("soft_affinity_weight_multiplier", default=1.0, min=0.0, help="Weight of soft-affinity groups."),
        cfg.FloatOpt("soft_anti_affinity_weight_multiplier", default=1.0, min=0.0,
                     help="Weight of soft-anti-affinity groups."),
        cfg.FloatOpt("build_failure_weight_multiplier", default=1000000.0, min=0.0,
                     help="Weight of having no builds that failed in a row."),
        cfg.FloatOpt("hypervisor_version_weight_multiplier", default=1.0,
                     help="Weight of newer hypervisors; negative: prefer older ones."),
        cfg.FloatOpt("num_instances_weight_multiplier", default=0.0,
                     help="Weight of the number of servers; positive: stack, negative: spread."),
        cfg.FloatOpt("image_props_weight_multiplier", default=0.0,
                     help="Weight of servers whose image has properties like the request's; negative: spread."),
        cfg.ListOpt("image_props_weight_setting", default=[],
                    help="Properties that count for it, each name=ratio; empty: all alike. Where only aggregates have "
                         "image_props_weight_multiplier, name some."),
        cfg.StrOpt("default_availability_zone", default="nova", help="Zone of hosts in no aggregate with one."),
        cfg.StrOpt("default_schedule_zone", help="Zone that new servers are pinned to when none is asked for; default: "
                                                 "they go to any."),
    ),
    "metrics": (
        cfg.FloatOpt("weight_multiplier", default=1.0,
                     help="Weight of what agents measure. Aggregates may have it as metrics_weight_multiplier."),
        cfg.ListOpt("weight_setting", default=[], help="Metrics that count, each name=ratio: cpu.percent=-1."),
        cfg.BoolOpt("required", default=True, help="Whether hosts that do not tell one of these metrics are left out."),
        cfg.FloatOpt("weight_of_unavailable", default=-10000.0, help="Else, what such a host has instead of the sum."),
    ),
    **hosts.OPTIONS,
    "identity": (
        cfg.Opt("auth_url", type=_url(("http://", "https://")), default="http://127.0.0.1:5000/v3",
                help="The identity service."),
        cfg.StrOpt("username", default="kilonova", help="Kilonova's own user."),
        cfg.StrOpt("password", default="", secret=True, help="Its password."),
        cfg.StrOpt("project_name", default="service", help="Its project."),
        cfg.StrOpt("domain", default="Default", help="Domain of that user and project."),
        cfg.StrOpt("region", default="RegionOne", help="Region whose endpoints are used."),
        cfg.BoolOpt("allow_plain_text", default=False,
                    help="Whether the identity service, what its catalogue names and other services that are given a "
                         "token may be asked by http:// on other machines; otherwise that is refused: at start where "
                         "their URLs are configured, and when it is needed where the catalogue has them."),
    ),
    "image": (
        cfg.StrOpt("endpoint", help="URL of the image service; default: from the catalogue."),
    ),
    "image_gateway": (
        cfg.HostAddressOpt("host", default="127.0.0.1",
                           help="Address that the image gateway listens on; default: [DEFAULT] my_ip."),
        cfg.PortOpt("port", default=9293, help="Its port."),
        cfg.IntOpt("workers", default=1, min=1, max=64, help="Its processes: about one for each processor that images "
                                                             "may use."),
        cfg.IntOpt("threads", default=64, min=1, max=256,
                   help="Threads of each process: images that it passes on at the same time."),
        cfg.Opt("url", type=_url(("http://", "https://")), default="http://127.0.0.1:9293",
                help="URL under which hosts reach it; default: my_ip and port, https:// where [tls] ca_file is set."),
        cfg.StrOpt("ticket_secret", default="", secret=True,
                   help="Makes and checks the tickets with which hosts ask for images; any long random text, the same "
                        "for all conductors and image gateways, and for nobody else. Several, separated by commas: "
                        "the first makes, all check. Default: secret_key, which API processes have too."),
    ),
    "network": (
        cfg.StrOpt("endpoint", help="URL of the network service; default: from the catalogue. When that has none "
                                    "either, servers have no networks."),
        cfg.IntOpt("timeout", default=10, min=1, max=60, help="Seconds for an answer of the network service."),
        cfg.IntOpt("calls", default=8, min=1, max=64, help="Calls to the network service at a time, each process."),
        cfg.IntOpt("vif_plugging_timeout", default=300, min=0, max=3600,
                   help="Seconds that a guest waits, paused, until the network service has wired it; 0: never."),
        cfg.BoolOpt("vif_plugging_is_fatal", default=True, help="Whether a server fails that was not wired in time."),
    ),
    "share": (
        cfg.StrOpt("endpoint", help="URL of the shared file system service; default: from the catalogue. When that has "
                                    "none either, servers have no shares."),
        cfg.IntOpt("timeout", default=10, min=1, max=60, help="Seconds for an answer of that service."),
        cfg.IntOpt("apply_timeout", default=60, min=1, max=3600,
                   help="Seconds in which it must let a host mount a share that was asked for."),
    ),
    "volume": (
        cfg.StrOpt("endpoint", help="URL of the block storage service; default: from the catalogue. When that has none "
                                    "either, servers have no volumes."),
        cfg.IntOpt("timeout", default=30, min=1, max=300, help="Seconds for an answer of that service."),
        cfg.BoolOpt("cross_az_attach", default=True,
                    help="Whether a server may have volumes of another availability zone. If not, volumes are made in "
                         "the server's zone."),
        cfg.IntOpt("create_timeout", default=600, min=1, max=86400,
                   help="Seconds in which it must make the volumes that a server is created with."),
    ),
    "metadata": (
        cfg.HostAddressOpt("host", default="127.0.0.1",
                           help="Address that the metadata service listens on; default: [DEFAULT] my_ip."),
        cfg.PortOpt("port", default=8775, help="Its port."),
        cfg.IntOpt("threads", default=16, min=1, max=64, help="Its threads."),
        cfg.StrOpt("proxy_shared_secret", default="", secret=True,
                   help="Signs what the network service's metadata proxy says; the same there. Without it nobody is "
                        "answered."),
        cfg.IntOpt("cache_seconds", default=15, min=0, max=600,
                   help="Seconds for which a server's data is remembered while it does not change."),
        cfg.IntOpt("rate", default=50, min=1, help="Requests a second that one guest is answered."),
        cfg.StrOpt("vendor_data_file", help="JSON file that every guest finds as vendor_data.json; agents read theirs "
                                            "for config drives."),
    ),
    "vendor_data": (
        cfg.ListOpt("providers", default=["static"], item_type=types.String(choices=["static", "dynamic"]),
                    help="Where vendor data comes from. static: [metadata] vendor_data_file, as vendor_data.json and "
                         "in vendor_data2.json; dynamic: dynamic_targets, in vendor_data2.json."),
        cfg.ListOpt("dynamic_targets", default=[],
                    help="Services that are asked for each server, by a POST of what is known of it; each name@url. "
                         "Metadata services ask them, and agents for config drives. User and password, in "
                         "keystoneauth's options: [vendordata_dynamic_auth]; empty: without a token."),
        cfg.StrOpt("dynamic_ssl_certfile", default="", help="CAs of the targets' certificates; empty: the system's."),
        cfg.IntOpt("dynamic_connect_timeout", default=5, min=1, max=60, help="Seconds to reach a target."),
        cfg.IntOpt("dynamic_read_timeout", default=5, min=1, max=60,
                   help="Seconds for each part of its answer. No boot waits longer for a target than both together."),
        cfg.BoolOpt("dynamic_failure_fatal", default=False,
                    help="Whether a server whose target fails is not built, and gets no vendor_data2.json; else the "
                         "target's part is empty."),
    ),
    "console": (
        cfg.HostAddressOpt("host", default="127.0.0.1", help="Address that the console service listens on."),
        cfg.PortOpt("port", default=6080, help="Its port."),
        cfg.Opt("public_url", type=_url(("http://", "https://")), default="http://127.0.0.1:6080",
                help="URL under which browsers reach it."),
        cfg.ListOpt("allowed_origins", default=[],
                    help="Origins of pages that may open a console or show one in a frame, besides public_url, for "
                         "example that of a dashboard (Horizon): https://cloud.example."),
        cfg.IntOpt("token_seconds", default=600, min=10, max=86400, help="Seconds for which a console's URL opens."),
        cfg.IntOpt("sessions", default=200, min=1, help="Open consoles in all."),
        cfg.IntOpt("sessions_per_server", default=10, min=1, help="Open consoles of one server."),
        cfg.IntOpt("sessions_per_user", default=50, min=1, help="Open consoles of one user."),
        cfg.StrOpt("novnc", default="/usr/share/novnc", help="Folder with noVNC."),
    ),
    "spice": (
        cfg.BoolOpt("enabled", default=False,
                    help="For agents: whether guests that are defined from then on speak SPICE beside VNC."),
        cfg.ListOpt("direct_proxies", default=[], item_type=types.IPAddress(),
                    help="For agents: addresses of the operator's own SPICE proxies, which alone reach spice-direct "
                         "consoles; none: there are none."),
        cfg.Opt("direct_proxy_base_url", type=like("|https?://.+", "https://spice.example/nova"), default="",
                help="For APIs: what the URL of a spice-direct console begins with, https://spice.example/nova; empty: "
                     "there are none."),
        cfg.StrOpt("html5", default="/usr/share/spice-html5",
                   help="For console services: folder with spice-html5, the page of spice-html5 consoles."),
    ),
    "placement": (
        cfg.HostAddressOpt("host", default="127.0.0.1", help="Address that the placement service listens on."),
        cfg.PortOpt("port", default=8778, help="Its port."),
        cfg.IntOpt("threads", default=8, min=1, max=64, help="Its threads."),
        cfg.StrOpt("policy_file", help="oslo.policy file over its defaults, in Placement's rule names; may change."),
    ),
    "quota": (
        cfg.StrOpt("driver", default="kilonova", choices=["kilonova", "unified"],
                   help="Whose limits are in force: this cloud's own, or Keystone's registered limits and limits, read "
                        "with oslo.limit as [oslo_limit] says; the other options of this section without unified_ are "
                        "for the first."),
        cfg.StrOpt("unified_limits_resource_strategy", default="require", choices=["require", "ignore"],
                   help="require: the resources of the list cannot be had while they have no registered limit, all "
                        "others have none. ignore: the other way round."),
        cfg.ListOpt("unified_limits_resource_list", default=["servers"],
                    item_type=like("servers|server_[a-z_]+|class:[A-Z][A-Z0-9_]*", "servers or class:VCPU"),
                    help="Resources by their names in Keystone."),
        cfg.IntOpt("unified_limits_cache_seconds", default=10, min=0, max=600,
                   help="How long Keystone's limits are believed without being asked for again."),
        cfg.IntOpt("instances", default=10, min=-1, help="Servers of a project; -1: no limit."),
        cfg.IntOpt("cores", default=20, min=-1, help="VCPUs of a project."),
        cfg.IntOpt("ram", default=51200, min=-1, help="Memory of a project, in MiB."),
        cfg.IntOpt("metadata_items", default=128, min=-1, help="Metadata items of a server."),
        cfg.IntOpt("key_pairs", default=100, min=-1, help="Key pairs of a user."),
        cfg.IntOpt("server_groups", default=10, min=-1, help="Server groups of a project."),
        cfg.IntOpt("server_group_members", default=10, min=-1, help="Servers of a server group."),
        cfg.IntOpt("injected_files", default=5, min=-1, help="Injected files of a server."),
        cfg.IntOpt("injected_file_content_bytes", default=10240, min=-1, help="Bytes of an injected file."),
        cfg.IntOpt("injected_file_path_bytes", default=255, min=-1, help="Bytes of an injected file's path."),
    ),
    "notifications": notifications.OPTIONS,
}
# fmt: on


def register(conf: cfg.ConfigOpts = CONF) -> None:
    """Register the options. Repeated calls have no effect."""
    for group, options in OPTIONS.items():
        conf.register_opts(options, group=None if group == "DEFAULT" else group)


def load(path: str | None = None, process: str = "") -> cfg.ConfigOpts:
    """Read the file and check every value.

    The path is, in order: the argument, $KILONOVA_CONF, the process's file in /etc/kilonova (if it
    exists).

    Raises:
        ConfigError: The file is missing, an option has a wrong value, or an option is unknown.
    """
    register()
    default_path = AGENT_FILE if process == AGENT else DEFAULT_FILE
    path = (
        path
        or os.environ.get("KILONOVA_CONF")
        or (default_path if os.path.exists(default_path) else None)
    )
    _fill(CONF, path, process)
    _library_options.clear()
    _library_options.update(_library_lines(path))
    return CONF


def reread(process: str = "") -> list[str]:
    """Read the file of ``load`` again, and return the names of changed options, like ``api.port``.

    Raises:
        ConfigError: As ``load``. Then no value has changed.
    """
    path = CONF.config_file[0] if CONF.config_file else None
    trial = cfg.ConfigOpts()
    register(trial)
    _fill(trial, path, process)
    before, now = (_values(conf) for conf in (CONF, trial))
    libraries = _library_lines(path)
    changed = [name for name in now if now[name] != before[name]]
    changed += sorted(
        name
        for name in libraries.keys() | _library_options.keys()
        if libraries.get(name) != _library_options.get(name)
    )
    CONF._sources[:] = trial._sources
    CONF.reload_config_files()
    _library_options.clear()
    _library_options.update(libraries)
    return changed


#: Options of libraries in the file. The libraries register them only later.
_library_options: dict[str, str] = {}


def _library_lines(path: str | None) -> dict[str, str]:
    own = {f"{group}.{option.dest}" for group, options in OPTIONS.items() for option in options}
    lines = config_file.lines(path) if path else []
    values = {f"{line.section}.{line.option}": line.value for line in lines}
    return {name: value for name, value in values.items() if name not in own}


def _values(conf: cfg.ConfigOpts) -> dict[str, object]:
    return {
        f"{group}.{option.dest}": (conf if group == "DEFAULT" else conf[group])[option.dest]
        for group, options in OPTIONS.items()
        for option in options
    }


def _fill(conf: cfg.ConfigOpts, path: str | None, process: str) -> None:
    """Fill ``conf`` from the file and the credentials.

    Raises:
        ConfigError: As ``load``.
    """
    conf.set_default("state_dir", AGENT_STATE if process == AGENT else STATE)
    try:
        conf(
            args=[],
            project="kilonova",
            default_config_files=[path] if path else [],
            default_config_dirs=[],
        )
        source = _take_credentials(conf, path, process)
        _derive(conf, source)
        for group, options in OPTIONS.items():
            section = conf if group == "DEFAULT" else conf[group]
            for option in options:
                _read(section, group, option.dest)
    except cfg.ConfigFilesNotFoundError as problem:
        raise ConfigError(
            f"There is no configuration file {path}. Make one with: kilonova config sample"
        ) from problem
    except cfg.Error as problem:
        raise ConfigError(f"{path}: {problem}") from problem
    _check_names_and_limits(conf, path, source.given)


def _read(section: cfg.ConfigOpts | cfg.ConfigOpts.GroupAttr, group: str, name: str) -> None:
    """Convert a value.

    Raises:
        cfg.Error: The value is wrong.
    """
    try:
        section[name]
    except (
        ValueError
    ) as problem:  # Raised for a credential. oslo.config raises its own errors for values in files.
        raise cfg.Error(f"credential {group}.{name}: {problem}") from problem


def _take_credentials(conf: cfg.ConfigOpts, path: str | None, process: str) -> CredentialSource:
    """Make credentials the source of values that neither the file nor the environment sets."""
    folder = Path(path).absolute().parent if path and process != AGENT else None
    try:
        source = CredentialSource(folder)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"a credential cannot be read: {problem}") from problem
    if conf._sources:
        # This drops the cached values of the previous source.
        conf.reload_config_files()
    # oslo.config adds sources only through an option of the file.
    conf._sources[:] = [source]
    return source


def _derive(conf: cfg.ConfigOpts, source: CredentialSource) -> None:
    """Set options that follow from other options or from files in their default place.

    ``origins`` names the source of each.
    """
    if not conf.tls.ca_file and not conf.tls.cert_file and source.add_tls_files():
        conf.reload_config_files()
    if conf.my_ip == "127.0.0.1" and not conf.tls.ca_file:
        return
    address = f"[{conf.my_ip}]" if ":" in conf.my_ip else conf.my_ip
    scheme = "https" if conf.tls.ca_file else "http"
    url = f"{scheme}://{address}:{conf.image_gateway.port}"
    derived = {
        "image_gateway.host": conf.my_ip,
        "metadata.host": conf.my_ip,
        "image_gateway.url": url,
    }
    source.add(derived, dict.fromkeys(derived, "from [DEFAULT] my_ip"))
    conf.reload_config_files()


def origins(conf: cfg.ConfigOpts) -> dict[str, str]:
    """Return option -> origin, for options that neither the file nor the environment sets.

    The options have names like ``api.port``.
    """
    credentials = [source for source in conf._sources if isinstance(source, CredentialSource)]
    return {name: origin for source in credentials for name, origin in source.origins.items()}


def _check_names_and_limits(
    conf: cfg.ConfigOpts, path: str | None, credentials: Collection[str]
) -> None:
    """Check that every line and credential is a known option, and that options fit together.

    Raises:
        ConfigError: One is unknown, or two contradict each other.
    """
    if path and (refused := config_file.unknown(path, OPTIONS)):
        raise ConfigError(refused)
    if refused := config_file.refused_credentials(path, credentials, OPTIONS):
        raise ConfigError(refused)
    limits = conf.database
    if 2 * limits.lock_timeout >= limits.statement_timeout:
        raise ConfigError(
            f"{path}: [database] lock_timeout is {limits.lock_timeout}, and statement_timeout "
            f"{limits.statement_timeout}: it must be less than half of it, or a statement that waits for "
            "two rows ends as if the server were dead"
        )


def vendor_data(conf: cfg.ConfigOpts) -> JsonObject:
    """Return the operator's static vendor data from [metadata] vendor_data_file. {} without a file.

    Raises:
        ConfigError: The file cannot be read, or contains no JSON object.
    """
    path = conf.metadata.vendor_data_file
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as problem:
        raise ConfigError(f"[metadata] vendor_data_file {path}: {problem}") from problem
    if not isinstance(content, dict):
        raise ConfigError(f"[metadata] vendor_data_file {path}: it must hold one JSON object")
    return content
