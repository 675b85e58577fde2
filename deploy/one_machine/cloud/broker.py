# SPDX-License-Identifier: Apache-2.0
"""One RabbitMQ node of our own: its own folder, cookie, ports and port mapper.

Used by the cloud on this machine and by deploy/testing/servers.py. It shares nothing with another
node or epmd on the machine, so starting and stopping it leaves those alone. Its folder belongs to
the user rabbitmq. Its password is in its configuration there, never on a command line.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.security import broker_identities as identities
from common.security import broker_names
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.cloud import Cloud
from deploy.progress import Failure

if TYPE_CHECKING:
    from common.security.tls import Tls

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
USER = "rabbitmq"
#: The longest message between the processes, with its header.
MAX_MESSAGE_BYTES = 17 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Broker:
    """``port`` of ``address`` speaks AMQP, with ``proof`` over TLS alone; ``port`` + 1 and + 2 of
    127.0.0.1 are for the node itself and its port mapper."""

    folder: Path
    port: int
    password: str
    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    proof: Tls | certificates.Files | None = None

    @classmethod
    def of(cls, cloud: Cloud) -> Broker:
        """Return the own node of a cloud. ``lifecycle.prepare`` makes its password."""
        return cls(
            cloud.home / "broker",
            cloud.ports.broker,
            cloud.password("broker"),
            cloud.address,
            cloud.hosts,
            certificates.of(cloud, certificates.BROKER),
        )

    @property
    def url(self) -> str:
        """For oslo.messaging."""
        return f"rabbit://kilonova:{self.password}@{self.address}:{self.port}/"

    def host_url(self, host: str) -> str:
        """The same in the name of a host, which may little there."""
        return f"rabbit://{broker_names.user_of(host)}:{self._password_of(host)}@{self.address}:{self.port}/"

    def role_url(self, role: str) -> str:
        """The same in the name of a role of the control plane."""
        return (
            f"rabbit://{broker_names.user_of_role(role)}:{self._password_of(f'role {role}')}"
            f"@{self.address}:{self.port}/"
        )

    def _password_of(self, host: str) -> str:
        return hmac.new(self.password.encode(), host.encode(), hashlib.sha256).hexdigest()

    @property
    def environment(self) -> dict[str, str]:
        """What the node's scripts read, instead of anything below /etc/rabbitmq."""
        return {
            "HOME": str(self.folder),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "RABBITMQ_NODENAME": "kilonova@localhost",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            # Without it the node also reads /etc/rabbitmq/conf.d.
            "RABBITMQ_CONFIG_FILES": str(self.folder / "none/*.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_DIST_PORT": str(self.port + 1),
            **(
                {}
                if self.proof
                else {
                    "RABBITMQ_NODE_IP_ADDRESS": self.address,
                    "RABBITMQ_NODE_PORT": str(self.port),
                }
            ),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(self.port + 2),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_MAX_PORTS": "4096",
        }

    def prepare(self) -> bool:
        """Make the folder and the configuration; returns whether a node that runs must learn its
        users anew.

        Raises:
            Failure: RabbitMQ is not installed.
        """
        if not (SCRIPTS / "rabbitmq-server").exists():
            raise Failure(
                "RabbitMQ is not installed.", "Install the Debian package rabbitmq-server."
            )
        for folder in (self.folder, self.folder / "data", self.folder / "log"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own(folder)
        self.folder.chmod(0o700)
        self._write(
            "rabbitmq.conf",
            "\n".join(
                (
                    *self._listeners(),
                    "default_user = kilonova",
                    f"default_pass = {self.password}",
                    "default_vhost = /",
                    "loopback_users.none = false",
                    "log.console.level = warning",
                    f"max_message_size = {MAX_MESSAGE_BYTES}",
                    "vm_memory_high_watermark.absolute = 512MB",
                    "disk_free_limit.absolute = 64MB",
                    *([f"load_definitions = {self._users}"] if self.hosts else []),
                    "",
                )
            ),
        )
        before = self._users.read_text() if self._users.exists() else ""
        if self.hosts:
            self._write(self._users.name, definitions(self))
        self._write("enabled_plugins", "[].\n")
        return bool(self.hosts) and before != self._users.read_text()

    def _listeners(self) -> list[str]:
        """Whoever connects is known by its password; a certificate that it shows must be the
        authority's."""
        where = f"{self.address}:{self.port}"
        if self.proof is None:
            return [f"listeners.tcp.1 = {where}"]
        copies = {
            name: self.folder / f"{name}.pem" for name in ("cacertfile", "certfile", "keyfile")
        }
        for name, path in zip(
            copies, (self.proof.ca, self.proof.cert, self.proof.key), strict=True
        ):
            self._write(copies[name].name, Path(path).read_text())
        return [
            "listeners.tcp = none",
            f"listeners.ssl.1 = {where}",
            "ssl_options.verify = verify_peer",
            "ssl_options.fail_if_no_peer_cert = false",
            "ssl_options.versions.1 = tlsv1.3",
            "ssl_options.versions.2 = tlsv1.2",
            *(f"ssl_options.{name} = {path}" for name, path in copies.items()),
        ]

    @property
    def _users(self) -> Path:
        return self.folder / "definitions.json"

    def learn_users(self) -> None:
        """Tell the node that runs of users that are new."""
        self.control("import_definitions", str(self._users))

    def _write(self, name: str, text: str) -> None:
        """Replaced as a whole: what stands there was perhaps made by the broker, whose folder it
        is."""
        path = self.folder / name
        part = path.with_name(f"{name}.new")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            self._own(file.fileno())
        part.replace(path)

    def _own(self, what: Path | int) -> None:
        """A path's last part is not followed: the broker may have put a symbolic link there."""
        if os.geteuid() == 0:
            user = pwd.getpwnam(USER)
            os.chown(
                what,
                user.pw_uid,
                user.pw_gid,
                **({} if isinstance(what, int) else {"follow_symlinks": False}),
            )

    def mapper_command(self) -> list[str]:
        """The port mapper, in the foreground; it must run before the node."""
        return [
            shutil.which("epmd", path="/usr/bin:/usr/local/bin") or "epmd",
            "-port",
            str(self.port + 2),
            "-address",
            "127.0.0.1",
        ]

    def command(self) -> list[str]:
        """The node, in the foreground."""
        return [str(SCRIPTS / "rabbitmq-server")]

    def published(self) -> int:
        """Messages that clients have published to this node since it started."""
        return int(
            self.control(
                "eval",
                "lists:sum([maps:get(messages_received_total, C, 0) || C <- maps:values("
                "rabbit_global_counters:overview())]).",
            ).strip()
        )

    def control(self, *arguments: str, seconds: float = 60) -> str:
        """Run rabbitmqctl against this node.

        Raises:
            Failure: it ended with an error.
        """
        done = subprocess.run(
            [str(SCRIPTS / "rabbitmqctl"), *arguments],
            env=self.environment,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            user=USER if os.geteuid() == 0 else None,
            cwd=self.folder,
        )
        if done.returncode != 0:
            raise Failure(
                f"rabbitmqctl {arguments[0]}: {(done.stderr or done.stdout).strip()[-500:]}",
                f"Look into the log of the broker below {self.folder}.",
            )
        return done.stdout


def definitions(broker: Broker) -> str:
    """The users of a node, and what they may, as RabbitMQ reads them when it starts: hosts and
    roles what they may, and one who may everything, for people."""
    own = identities.Identity("kilonova", broker.password, ".*", ".*", ".*")
    others = [
        *(identities.of_host(host, broker._password_of(host)) for host in broker.hosts),
        *(
            identities.of_role(role, broker._password_of(f"role {role}"))
            for role in broker_names.ROLES
        ),
    ]
    return (
        json.dumps(
            {
                "vhosts": [{"name": "/"}],
                "users": [
                    {
                        "name": one.user,
                        "password_hash": _hashed(one),
                        "tags": [],
                        "hashing_algorithm": "rabbit_password_hashing_sha256",
                        "limits": dict(one.limits),
                    }
                    for one in (own, *others)
                ],
                "permissions": [one.permissions() for one in (own, *others)],
                "topic_permissions": [topic for one in others for topic in one.topic_permissions()],
            },
            indent=1,
        )
        + "\n"
    )


def _hashed(identity: identities.Identity) -> str:
    """RabbitMQ's salted hash of a password; the salt follows from both, so that the file stays as
    it is."""
    salt = hashlib.sha256(f"{identity.user} {identity.password}".encode()).digest()[:4]
    return base64.b64encode(
        salt + hashlib.sha256(salt + identity.password.encode()).digest()
    ).decode()
