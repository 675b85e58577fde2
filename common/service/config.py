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
                           help="Name of this host in the cloud. The name must never change."),
        cfg.HostAddressOpt("my_ip", default="127.0.0.1",
                           help="Address of a controller at which hosts and other controllers reach it. The metadata "
                                "service and the image gateway listen on this address unless their sections set "
                                "another."),
        cfg.StrOpt("state_dir", default=STATE,
                   help="Folder for data that must survive a restart: journal, guests' disks, image cache. Default of "
                        f"an agent: {AGENT_STATE}."),
        cfg.StrOpt("secret_key", default="", secret=True,
                   help="Key that encrypts passwords and user data in the database, and signs tickets with which "
                        "hosts fetch images. Any long random text, the same for all processes except agents. Several "
                        "keys are separated by commas: the first encrypts and signs, all are accepted."),
        cfg.IntOpt("reclaim_instance_interval", default=0, min=0,
                   help="Seconds for which a deleted server can be restored. 0: a delete is final at once."),
        cfg.IntOpt("shelved_offload_time", default=0, min=-1,
                   help="Seconds after which a shelved server is removed from its host. 0: at once. -1: never "
                        "automatically."),
        cfg.IntOpt("max_local_block_devices", default=3, min=1, max=10,
                   help="Maximum number of disks of a server on its host."),
        cfg.StrOpt("default_ephemeral_format", default="", choices=["", "ext2", "ext3", "ext4", "xfs", "vfat", "ntfs"],
                   help="File system of ephemeral disks. Empty: ext4 for Linux, ntfs for Windows, vfat for others."),
        *notifications.AUDIT,
        cfg.StrOpt("log_level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"],
                   help="Lowest severity that is logged."),
    ),
    "log": (
        cfg.StrOpt("format", default="text", choices=["text", "json"],
                   help="Format of the log lines on standard error. text: for people. json: one JSON object per "
                        "line."),
    ),
    "prometheus": (
        cfg.BoolOpt("enabled", default=False, help="Whether processes count their work, and serve the metrics to "
                                                   "Prometheus."),
        cfg.HostAddressOpt("host", default="127.0.0.1",
                           help="Address on which each process serves its metrics, in plain text and without a "
                                "password. If it is not a loopback address, let only Prometheus reach the ports."),
        cfg.PortOpt("api_port", default=9174, help="Port of the metrics of api processes. 0: no metrics."),
        cfg.PortOpt("conductor_port", default=9175, help="Port of the metrics of conductor processes. 0: no metrics."),
        cfg.PortOpt("scheduler_port", default=9176, help="Port of the metrics of scheduler processes. 0: no metrics."),
        cfg.PortOpt("agent_port", default=9177, help="Port of the metrics of agent processes. 0: no metrics."),
        cfg.PortOpt("placement_port", default=9178, help="Port of the metrics of placement processes. 0: no metrics."),
        cfg.PortOpt("metadata_port", default=9179, help="Port of the metrics of metadata processes. 0: no metrics."),
        cfg.PortOpt("console_port", default=9180, help="Port of the metrics of console processes. 0: no metrics."),
        cfg.PortOpt("image_gateway_port", default=9181,
                    help="Port of the metrics of image gateway processes. 0: no metrics."),
        cfg.IntOpt("port_step", default=100, min=0, max=1000,
                   help="Distance between the metrics ports of several processes of the same kind on one machine. If "
                        "the port is taken, a process uses the port that is higher by this number, and so on. Its "
                        "log has the port. 0: only the first process has metrics."),
    ),
    "tracing": (
        cfg.BoolOpt("enabled", default=False,
                    help="Whether spans of requests, actions, steps and commands are sent to an OpenTelemetry "
                         "collector. Needs the extra tracing: pip install 'kilonova[tracing]'."),
        cfg.Opt("endpoint", type=_url(("http://", "https://")), default="http://127.0.0.1:4318/v1/traces",
                help="URL to which spans are sent as OTLP over HTTP. For headers, set OpenTelemetry's variable "
                     "OTEL_EXPORTER_OTLP_HEADERS in the unit's environment."),
        cfg.FloatOpt("sample_ratio", default=1.0, min=0, max=1,
                     help="Fraction of requests that are traced. Must be the same for all processes and hosts."),
    ),
    "database": (
        cfg.Opt("url", type=_url(_DATABASES), default="sqlite:////var/lib/kilonova/kilonova.db", secret=True,
                help="SQLAlchemy URL of the database. SQLite is only for a single machine."),
        cfg.BoolOpt("tls", default=True,
                    help="Whether connections to the database server use TLS if [tls] ca_file is set. false: for a "
                         "server on this machine."),
        cfg.IntOpt("connect_timeout", default=5, min=1, max=60,
                   help="Maximum seconds to connect to the server, or to wait for one of the process's connections. "
                        "If a proxy or several addresses are in front of the server, allow for the time of a "
                        "fail-over."),
        cfg.IntOpt("lock_timeout", default=3, min=1, max=60,
                   help="Maximum seconds for which a statement waits for rows that another transaction has locked. A "
                        "transaction that waited in vain is retried for 9 seconds. Then requests are answered with "
                        "503, and conductors retry later. Must be less than half of statement_timeout."),
        cfg.IntOpt("statement_timeout", default=10, min=1, max=600,
                   help="Maximum seconds for one statement. If the server does not answer for 2 seconds longer, it "
                        "counts as dead and the connection is closed. Upgrades and the doctor are not limited."),
        cfg.IntOpt("idle_transaction_timeout", default=10, min=1, max=600,
                   help="Seconds after which the server ends a transaction of a client that is silent, and unlocks "
                        "its rows. Other transactions wait this long for rows of a machine that dies within a "
                        "transaction."),
    ),
    "tls": (
        cfg.StrOpt("ca_file", default="",
                   help="PEM file with the authorities that sign the certificates of broker, database and Kilonova's "
                        "processes. If set, all connections between these use TLS, certificates and names are "
                        "verified, and there is no fallback to plain text."),
        cfg.StrOpt("cert_file", default="",
                   help="PEM file with this process's certificate, for the names and addresses at which others reach "
                        "it. Agents, metadata service, image gateway and console service need one."),
        cfg.StrOpt("key_file", default="", help="PEM file with the key of cert_file, without a password. Default: "
                                                "cert_file."),
        cfg.StrOpt("ca_key_file", default="",
                   help="Only on machines of conductors: PEM file with the key of the authority in ca_file. If set, "
                        "conductors issue the certificate of a host that joins. Otherwise the operator provides the "
                        "certificate."),
        cfg.BoolOpt("allow_plain_text", default=False,
                    help="Whether connections to other machines may be plain text if TLS is not configured. If not, "
                         "processes refuse such a configuration at start. Loopback addresses are always allowed."),
    ),
    "api": (
        cfg.HostAddressOpt("host", default="127.0.0.1", help="Address on which the API listens."),
        cfg.PortOpt("port", default=8774, help="Port of the API."),
        cfg.IntOpt("workers", default=1, min=1, max=64, help="Number of API processes."),
        cfg.IntOpt("threads", default=16, min=1, max=64,
                   help="Number of threads of each API process. Requests for single servers have four times as many "
                        "additional threads. One project uses at most half of them for changes and an eighth for "
                        "reads."),
        cfg.IntOpt("max_limit", default=1000, min=1, max=10000, help="Maximum number of items in one list."),
        cfg.IntOpt("max_body", default=1024 * 1024, min=1024,
                   help="Maximum size of a request body in bytes. 65536 is enough if no request needs more."),
        cfg.StrOpt("public_url", help="URL with which links in answers begin. Default: the URL of the request."),
        cfg.StrOpt("policy_file",
                   help="oslo.policy file that overrides the defaults, with Nova's rule names. It is read again when "
                        "it changes."),
        cfg.Opt("pci_alias", type=PciAliases(), default={}, sample_default="[]",
                help='Names of PCI devices for pci_passthrough:alias in flavors, as a JSON list of {"name": "gpu", '
                     '"vendor_id": "10de", "product_id": "1db4"}.'),
    ),
    "http": (
        cfg.IntOpt("connections", default=4000, min=64, max=60_000,
                   help="Maximum number of client connections to one process of API, metadata service, placement "
                        "service or image gateway. A further connection replaces the longest waiting one of the "
                        "address with the most connections."),
        cfg.IntOpt("connections_per_address", default=500, min=1,
                   help="Maximum number of client connections from one address (for IPv6: one /64). Increase it "
                        "behind a proxy, which is one address."),
        cfg.IntOpt("head_seconds", default=10, min=1, help="Maximum seconds for the request line and the headers of "
                                                           "a request."),
        cfg.IntOpt("stall_timeout_seconds", deprecated_name="patience_seconds", default=10, min=1,
                   help="Maximum seconds to receive a body or to send an answer, in addition to one second for each "
                        "16 KiB."),
        cfg.IntOpt("idle_seconds", default=75, min=1, help="Seconds for which a connection stays open between "
                                                           "requests."),
    ),
    "oslo_middleware": (
        cfg.BoolOpt("enable_proxy_headers_parsing", default=False,
                    help="Whether HTTP services use Forwarded, X-Forwarded-Proto, -Host, -For and -Prefix for links. "
                         "Only safe if every request comes through a proxy that replaces these headers."),
    ),
    "conductor": (
        cfg.IntOpt("batch", default=64, min=1, max=1000, help="Maximum number of actions that one transaction "
                                                              "advances."),
        cfg.IntOpt("max_attempts", default=3, min=1, max=20, help="Maximum number of hosts on which a create is "
                                                                  "attempted."),
        cfg.IntOpt("host_silence", default=30, min=10, max=600,
                   help="Seconds without a sign of life after which a host counts as down."),
        cfg.IntOpt("resize_confirm_window", default=0, min=0,
                   help="Seconds after which a resize that is neither confirmed nor reverted is confirmed. 0: never."),
        cfg.BoolOpt("allow_resize_to_same_host", default=False, help="Whether a resize may stay on the same host."),
        cfg.StrOpt("fencing_hook", default="",
                   help="Program that makes sure that the guests of a host are dead. Its argument is the host's "
                        "name, and it must exit with 0 only if the guests are dead. Without a hook, a silent host is "
                        "evacuated only if it was forced down."),
        cfg.IntOpt("fencing_timeout", default=120, min=1, max=3600,
                   help="Maximum seconds that the fencing hook may take."),
    ),
    "host_keys": (
        cfg.StrOpt("command_secret", default="", secret=True,
                   help="Secret from which the keys for commands and reports are derived. Any long random text, the "
                        "same for all conductors, and on no other machine. Several secrets are separated by commas: "
                        "the first seals, all are accepted. docs/secrets.md says how to change it."),
        cfg.StrOpt("query_secret", default="", secret=True,
                   help="Secret from which the keys for queries to hosts are derived, for example for a console. Any "
                        "long random text, the same for all API, console and conductor processes, and on no host. "
                        "Several secrets are separated by commas: the first seals, all are accepted."),
        cfg.ListOpt("broker_addresses", default=[],
                    item_type=types.String(regex=r"^([\w.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?$"),
                    help="Addresses of the broker's nodes for hosts, each HOST or HOST:PORT. Hosts fetch a changed "
                         "list from the conductors. Default: a new host gets the addresses in transport_url, and "
                         "the others keep theirs."),
        cfg.Opt("management_url", type=_url(("http://", "https://")), secret=True,
                help="URL of RabbitMQ's management API with an administrator's name and password, for kilonova host "
                     "add, rotate and remove. Default: these commands print the commands to run at the broker."),
    ),
    "ha": (
        cfg.BoolOpt("evacuate", default=False,
                    help="Whether the servers of a host that is down are evacuated automatically. Needs [conductor] "
                         "fencing_hook, which is called first."),
        cfg.IntOpt("after", default=60, min=10, help="Seconds for which the host must have been silent before an "
                                                     "automatic evacuation."),
        cfg.IntOpt("max_hosts", default=1, min=1,
                   help="Maximum number of hosts with servers that may be down. If more are down, no host is "
                        "evacuated automatically, because a broken network is more likely."),
    ),
    "scheduler": (
        cfg.ListOpt("enabled_filters",
                    default=["ComputeFilter", "ComputeCapabilitiesFilter", "ImagePropertiesFilter",
                             "ServerGroupAntiAffinityFilter", "ServerGroupAffinityFilter"],
                    help="Filters in order: Nova's, and those of installed distributions. Zones, traits, resources, "
                         "server groups, NUMA nodes and PCI devices are always checked."),
        cfg.IntOpt("max_instances_per_host", default=50, min=1,
                   help="Maximum number of servers on a host, for NumInstancesFilter. AggregateNumInstancesFilter "
                        "uses it for hosts without a value in the metadata of an aggregate."),
        cfg.IntOpt("max_io_ops_per_host", default=8, min=0,
                   help="Maximum number of servers that are built, copied or moved on a host at a time, for "
                        "IoOpsFilter and AggregateIoOpsFilter."),
        cfg.StrOpt("image_properties_default_architecture",
                   choices=["aarch64", "armv7l", "i686", "ppc64", "ppc64le", "riscv64", "s390x", "x86_64"],
                   help="Architecture of images that name no architecture, for ImagePropertiesFilter. Default: any."),
        cfg.ListOpt("isolated_images", default=[],
                    help="Ids of images that run only on isolated_hosts, for IsolatedHostsFilter."),
        cfg.ListOpt("isolated_hosts", default=[], help="Names of the hosts for isolated_images."),
        cfg.BoolOpt("restrict_isolated_hosts_to_isolated_images", default=True,
                    help="Whether isolated_hosts refuse servers of other images."),
        cfg.StrOpt("aggregate_image_properties_isolation_namespace",
                   help="Prefix of the aggregate metadata that AggregateImagePropertiesIsolation compares, without "
                        "the separator. Default: all metadata is compared."),
        cfg.StrOpt("aggregate_image_properties_isolation_separator", default=".",
                   help="Separator after the prefix in aggregate_image_properties_isolation_namespace."),
        cfg.IntOpt("build_failure_limit", default=5, min=0,
                   help="Number of failed builds in a row after which a host is left out for build_failure_pause. 0: "
                        "never."),
        cfg.IntOpt("build_failure_pause", default=300, min=1,
                   help="Seconds for which such a host is left out. Then it gets one server as a test."),
        cfg.ListOpt("enabled_weighers", default=[
            "RAMWeigher", "CPUWeigher", "DiskWeigher", "MetricsWeigher", "IoOpsWeigher", "PCIWeigher",
            "ServerGroupSoftAffinityWeigher", "ServerGroupSoftAntiAffinityWeigher", "BuildFailureWeigher",
            "HypervisorVersionWeigher", "NumInstancesWeigher", "ImagePropertiesWeigher"],
                    help="Weighers: Nova's, and those of installed distributions. The metadata of aggregates may set "
                         "a multiplier too. If several aggregates of a host do, the smallest value counts."),
        cfg.FloatOpt("ram_weight_multiplier", default=1.0, help="Weight of free memory. Negative: fill hosts one "
                                                                "after the other."),
        cfg.FloatOpt("cpu_weight_multiplier", default=1.0, help="Weight of free VCPUs. Negative: fill hosts one "
                                                                "after the other."),
        cfg.FloatOpt("disk_weight_multiplier", default=1.0, help="Weight of free disk space. Negative: fill hosts "
                                                                 "one after the other."),
        cfg.FloatOpt("io_ops_weight_multiplier", default=-1.0,
                     help="Weight of the number of servers that are built, copied or moved on a host. Negative: "
                          "prefer hosts with few."),
        cfg.FloatOpt("pci_weight_multiplier", default=1.0, min=0.0,
                     help="Weight of keeping hosts with many free PCI devices for servers that request many."),
        cfg.FloatOpt("soft_affinity_weight_multiplier", default=1.0, min=0.0, help="Weight of soft-affinity groups."),
        cfg.FloatOpt("soft_anti_affinity_weight_multiplier", default=1.0, min=0.0,
                     help="Weight of soft-anti-affinity groups."),
        cfg.FloatOpt("build_failure_weight_multiplier", default=1000000.0, min=0.0,
                     help="Weight of hosts without failed builds in a row."),
        cfg.FloatOpt("hypervisor_version_weight_multiplier", default=1.0,
                     help="Weight of newer hypervisor versions. Negative: prefer older versions."),
        cfg.FloatOpt("num_instances_weight_multiplier", default=0.0,
                     help="Weight of the number of servers on a host. Positive: fill hosts one after the other. "
                          "Negative: spread servers."),
        cfg.FloatOpt("image_props_weight_multiplier", default=0.0,
                     help="Weight of servers on the host whose image has the same properties as the image of the "
                          "request. Negative: spread them."),
        cfg.ListOpt("image_props_weight_setting", default=[],
                    help="Image properties that ImagePropertiesWeigher compares, each as name=ratio. Empty: all, "
                         "with equal weight. Set some if only aggregates have image_props_weight_multiplier."),
        cfg.StrOpt("default_availability_zone", default="nova", help="Availability zone of hosts that are in no "
                                                                     "aggregate with a zone."),
        cfg.StrOpt("default_schedule_zone", help="Availability zone of new servers if the request names none. "
                                                 "Default: any zone."),
    ),
    "metrics": (
        cfg.FloatOpt("weight_multiplier", default=1.0,
                     help="Weight of the metrics that agents measure. Aggregates may set it as "
                          "metrics_weight_multiplier."),
        cfg.ListOpt("weight_setting", default=[], help="Metrics that MetricsWeigher uses, each as name=ratio, for "
                                                       "example cpu.percent=-1."),
        cfg.BoolOpt("required", default=True, help="Whether hosts that do not report one of these metrics are left "
                                                   "out."),
        cfg.FloatOpt("weight_of_unavailable", default=-10000.0, help="Weight of a host that does not report one of "
                                                                     "these metrics, if required is false."),
    ),
    **hosts.OPTIONS,
    "identity": (
        cfg.Opt("auth_url", type=_url(("http://", "https://")), default="http://127.0.0.1:5000/v3",
                help="URL of the identity service."),
        cfg.StrOpt("username", default="kilonova", help="Name of Kilonova's own user."),
        cfg.StrOpt("password", default="", secret=True, help="Password of Kilonova's own user."),
        cfg.StrOpt("project_name", default="service", help="Project of Kilonova's own user."),
        cfg.StrOpt("domain", default="Default", help="Domain of Kilonova's own user and of its project."),
        cfg.StrOpt("region", default="RegionOne", help="Region whose endpoints are used."),
        cfg.BoolOpt("allow_plain_text", default=False,
                    help="Whether the identity service and other services that get a token may be called with "
                         "http:// on other machines. If not, configured URLs are refused at start, and URLs of the "
                         "catalogue are refused when they are used."),
    ),
    "image": (
        cfg.StrOpt("endpoint", help="URL of the image service; default: from the catalogue."),
    ),
    "image_gateway": (
        cfg.HostAddressOpt("host", default="127.0.0.1",
                           help="Address on which the image gateway listens. Default: [DEFAULT] my_ip."),
        cfg.PortOpt("port", default=9293, help="Port of the image gateway."),
        cfg.IntOpt("workers", default=1, min=1, max=64, help="Number of image gateway processes, about one for each "
                                                             "processor that image transfers may use."),
        cfg.IntOpt("threads", default=64, min=1, max=256,
                   help="Number of threads of each process, which is the number of images that it transfers at the "
                        "same time."),
        cfg.Opt("url", type=_url(("http://", "https://")), default="http://127.0.0.1:9293",
                help="URL at which hosts reach the image gateway. Default: my_ip and port, with https:// if [tls] "
                     "ca_file is set."),
        cfg.StrOpt("ticket_secret", default="", secret=True,
                   help="Secret that signs the tickets with which hosts fetch images. Any long random text, only for "
                        "conductors and image gateways, and the same for all. Several secrets are separated by "
                        "commas: the first signs, all are accepted. Default: secret_key, which API processes have "
                        "too."),
    ),
    "network": (
        cfg.StrOpt("endpoint", help="URL of the network service. Default: from the catalogue. If the catalogue has "
                                    "none either, servers have no networks."),
        cfg.IntOpt("timeout", default=10, min=1, max=60, help="Maximum seconds for an answer of the network service. A "
                                                               "request of a user waits at most 8 seconds."),
        cfg.IntOpt("calls", default=8, min=1, max=64, help="Maximum number of simultaneous calls of each process to "
                                                           "the network service."),
        cfg.IntOpt("vif_plugging_timeout", default=300, min=0, max=3600,
                   help="Maximum seconds for which a guest is paused until the network service has connected its "
                        "ports. 0: guests do not wait."),
        cfg.BoolOpt("vif_plugging_is_fatal", default=True, help="Whether a server fails if its ports are not "
                                                                "connected in time."),
    ),
    "share": (
        cfg.StrOpt("endpoint", help="URL of the shared file system service. Default: from the catalogue. If the "
                                    "catalogue has none either, servers have no shares."),
        cfg.IntOpt("timeout", default=10, min=1, max=60, help="Maximum seconds for an answer of the shared file "
                                                              "system service. A request of a user waits at most 8 "
                                                              "seconds."),
        cfg.IntOpt("apply_timeout", default=60, min=1, max=3600,
                   help="Maximum seconds until the service has applied the rule that lets a host mount a share."),
    ),
    "volume": (
        cfg.StrOpt("endpoint", help="URL of the block storage service. Default: from the catalogue. If the catalogue "
                                    "has none either, servers have no volumes."),
        cfg.IntOpt("timeout", default=30, min=1, max=300, help="Maximum seconds for an answer of the block storage "
                                                               "service. A request of a user waits at most 8 "
                                                               "seconds."),
        cfg.BoolOpt("cross_az_attach", default=True,
                    help="Whether a server may have volumes of another availability zone. If not, new volumes are "
                         "created in the server's zone."),
        cfg.IntOpt("create_timeout", default=600, min=1, max=86400,
                   help="Maximum seconds until the service has created the volumes of a new server."),
    ),
    "metadata": (
        cfg.HostAddressOpt("host", default="127.0.0.1",
                           help="Address on which the metadata service listens. Default: [DEFAULT] my_ip."),
        cfg.PortOpt("port", default=8775, help="Port of the metadata service."),
        cfg.IntOpt("threads", default=16, min=1, max=64, help="Number of threads of the metadata service."),
        cfg.StrOpt("proxy_shared_secret", default="", secret=True,
                   help="Secret with which the network service's metadata proxy signs requests, the same as there. "
                        "Without it the metadata service refuses all requests. Several secrets are separated by "
                        "commas, and all are accepted."),
        cfg.IntOpt("cache_seconds", default=15, min=0, max=600,
                   help="Seconds for which a server's data is cached while it does not change."),
        cfg.IntOpt("rate", default=50, min=1, help="Maximum number of requests per second of one guest."),
        cfg.StrOpt("vendor_data_file", help="JSON file that every guest gets as vendor_data.json. Agents read their "
                                            "own file for config drives."),
    ),
    "vendor_data": (
        cfg.ListOpt("providers", default=["static"], item_type=types.String(choices=["static", "dynamic"]),
                    help="Sources of vendor data. static: [metadata] vendor_data_file, as vendor_data.json and in "
                         "vendor_data2.json. dynamic: dynamic_targets, in vendor_data2.json."),
        cfg.ListOpt("dynamic_targets", default=[],
                    help="Services that get a POST request with facts about a server, each as name@url. Metadata "
                         "services send it, and agents for config drives. [vendordata_dynamic_auth] has user and "
                         "password as options of keystoneauth. If that section is empty, the request has no token."),
        cfg.StrOpt("dynamic_ssl_certfile", default="", help="PEM file with the authorities of the targets' "
                                                            "certificates. Empty: those of the system."),
        cfg.IntOpt("dynamic_connect_timeout", default=5, min=1, max=60,
                   help="Maximum seconds to connect to a target."),
        cfg.IntOpt("dynamic_read_timeout", default=5, min=1, max=60,
                   help="Maximum seconds for each part of a target's answer. No boot waits longer for a target than "
                        "both timeouts together."),
        cfg.BoolOpt("dynamic_failure_fatal", default=False,
                    help="Whether a server fails to build, and gets no vendor_data2.json, if a target fails. If not, "
                         "the target's part is empty."),
    ),
    "console": (
        cfg.HostAddressOpt("host", default="127.0.0.1", help="Address on which the console service listens."),
        cfg.PortOpt("port", default=6080, help="Port of the console service."),
        cfg.Opt("public_url", type=_url(("http://", "https://")), default="http://127.0.0.1:6080",
                help="URL at which browsers reach the console service."),
        cfg.ListOpt("allowed_origins", default=[],
                    help="Origins of pages besides public_url that may open a console or show one in a frame, for "
                         "example that of a dashboard (Horizon): https://cloud.example."),
        cfg.IntOpt("token_seconds", default=600, min=10, max=86400,
                   help="Seconds for which the URL of a console is valid."),
        cfg.IntOpt("sessions", default=200, min=1, help="Maximum number of open consoles."),
        cfg.IntOpt("sessions_per_server", default=10, min=1, help="Maximum number of open consoles of one server."),
        cfg.IntOpt("sessions_per_user", default=50, min=1, help="Maximum number of open consoles of one user."),
        cfg.StrOpt("novnc", default="/usr/share/novnc", help="Folder with noVNC."),
    ),
    "spice": (
        cfg.BoolOpt("enabled", default=False,
                    help="For agents: whether guests that are defined from now on have SPICE in addition to VNC."),
        cfg.ListOpt("direct_proxies", default=[], item_type=types.IPAddress(),
                    help="For agents: addresses of the operator's own SPICE proxies. Only these reach spice-direct "
                         "consoles. Empty: there are no spice-direct consoles."),
        cfg.Opt("direct_proxy_base_url", type=like("|https?://.+", "https://spice.example/nova"), default="",
                help="For APIs: beginning of the URL of a spice-direct console, for example "
                     "https://spice.example/nova. Empty: there are no spice-direct consoles."),
        cfg.StrOpt("html5", default="/usr/share/spice-html5",
                   help="For console services: folder with spice-html5, the page of spice-html5 consoles."),
    ),
    "placement": (
        cfg.HostAddressOpt("host", default="127.0.0.1", help="Address on which the placement service listens."),
        cfg.PortOpt("port", default=8778, help="Port of the placement service."),
        cfg.IntOpt("threads", default=8, min=1, max=64, help="Number of threads of the placement service."),
        cfg.StrOpt("policy_file", help="oslo.policy file that overrides the defaults, with Placement's rule names. "
                                       "It is read again when it changes."),
    ),
    "quota": (
        cfg.StrOpt("driver", default="kilonova", choices=["kilonova", "unified"],
                   help="Source of the limits. kilonova: this cloud's own limits. unified: Keystone's registered "
                        "limits and limits, read with oslo.limit as configured in [oslo_limit]. The options of this "
                        "section without unified_ are for the driver kilonova."),
        cfg.StrOpt("unified_limits_resource_strategy", default="require", choices=["require", "ignore"],
                   help="require: a resource of the list without a registered limit cannot be used, and other "
                        "resources without one have no limit. ignore: a resource of the list without a registered "
                        "limit has no limit, and others without one cannot be used."),
        cfg.ListOpt("unified_limits_resource_list", default=["servers"],
                    item_type=like("servers|server_[a-z_]+|class:[A-Z][A-Z0-9_]*", "servers or class:VCPU"),
                    help="Resources, with their names in Keystone."),
        cfg.IntOpt("unified_limits_cache_seconds", default=10, min=0, max=600,
                   help="Seconds for which Keystone's limits are cached."),
        cfg.IntOpt("instances", default=10, min=-1, help="Maximum number of servers of a project. -1: no limit."),
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
    """Register ``OPTIONS``. Repeated calls have no effect."""
    for group, options in OPTIONS.items():
        conf.register_opts(options, group=None if group == "DEFAULT" else group)


def load(path: str | None = None, process: str = "") -> cfg.ConfigOpts:
    """Read the configuration file into ``CONF``, check every value, and return ``CONF``.

    Without any file all options have their defaults, credentials or values of the environment.

    Args:
        path: Path of the file. None: $KILONOVA_CONF, else the process's file in /etc/kilonova if it
            exists.
        process: Name of the process without "kilonova-", or "" for a command.

    Raises:
        ConfigError: The file is missing or malformed, an option is unknown or has a wrong value,
            two options contradict each other, or a credential cannot be used.
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

    ``CONF`` then has the new values. The names include options of libraries in the file.
    ``process`` is that of ``load``.

    Raises:
        ConfigError: As ``load``. Then ``CONF`` is unchanged.
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
    """Fill ``conf`` from file, environment and credentials, add derived values, and check all.

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
            f"There is no configuration file {path}. Create one with: kilonova config sample"
        ) from problem
    except cfg.Error as problem:
        raise ConfigError(f"{path}: {problem}") from problem
    _check_names_and_limits(conf, path, source.given)


def _read(section: cfg.ConfigOpts | cfg.ConfigOpts.GroupAttr, group: str, name: str) -> None:
    """Check the value of an option by reading the option.

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
    """Make credentials the source of values that neither the file nor the environment sets.

    Return this source.

    Raises:
        ConfigError: A credential cannot be read or exists twice, or others can read the folder.
    """
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

    Values in the file, the environment or credentials take precedence over derived values.
    ``source.origins`` then has the origin of each derived value.

    Raises:
        cfg.Error: The value of an option that this function needs is wrong.
    """
    _read(conf, "DEFAULT", "my_ip")
    _read(conf.image_gateway, "image_gateway", "port")
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
    """Return the origin of each credential and each derived value, by option (``api.port``)."""
    credentials = [source for source in conf._sources if isinstance(source, CredentialSource)]
    return {name: origin for source in credentials for name, origin in source.origins.items()}


def _check_names_and_limits(
    conf: cfg.ConfigOpts, path: str | None, credentials: Collection[str]
) -> None:
    """Check the names of all sections, options and credentials, and the limits of [database].

    Raises:
        ConfigError: A section or an option in the file is unknown, a credential is refused
            (``refused_credentials``), or lock_timeout is not less than half of statement_timeout.
    """
    if path and (refused := config_file.unknown(path, OPTIONS)):
        raise ConfigError(refused)
    if refused := config_file.refused_credentials(path, credentials, OPTIONS):
        raise ConfigError(refused)
    limits = conf.database
    if 2 * limits.lock_timeout >= limits.statement_timeout:
        raise ConfigError(
            f"{path}: [database] lock_timeout ({limits.lock_timeout}) must be less than half of statement_timeout "
            f"({limits.statement_timeout}), because a statement may wait for two locked rows"
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
        raise ConfigError(
            f"[metadata] vendor_data_file {path}: the file must contain one JSON object"
        )
    return content
