# SPDX-License-Identifier: Apache-2.0
"""A RabbitMQ node with a separate folder, cookie, ports and port mapper.

The cloud on this machine and deploy/testing/servers.py use this module. The node shares no part
with another node or epmd of the machine, so these are not affected by a start or stop. The folder
belongs to the user rabbitmq. The password is in a configuration file there, and never on a command
line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from common.security import broker_identities as identities
from common.security import broker_names
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.cloud import Cloud
from deploy.progress import Failure

if TYPE_CHECKING:
    from common.security.tls import Tls

SCRIPTS = Path("/usr/lib/rabbitmq/bin")
USER = "rabbitmq"
#: Time limit of rabbitmqctl. On a busy machine start_app took 72 seconds.
CONTROL_SECONDS = 240
#: The longest message between the processes, with the header.
MAX_MESSAGE_BYTES = 17 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Broker:
    """A RabbitMQ node: the folder, the listener and the users.

    Attributes:
        folder: The node's folder.
        port: The port for AMQP. The next two ports of 127.0.0.1 are for the node itself and for its
            port mapper.
        password: The password of the user kilonova. Hosts and roles have derived passwords.
        address: The address for AMQP.
        hosts: The hosts that get users of their own. Roles get users only if there are hosts.
        proof: The files of the certificate, for AMQP over TLS only, or None for plain text.
    """

    folder: Path
    port: int
    password: str
    address: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    proof: Tls | certificates.Files | None = None

    @classmethod
    def of(cls, cloud: Cloud) -> Broker:
        """Return the node of a cloud. The password must exist: ``lifecycle.prepare`` makes it."""
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
        """The URL for oslo.messaging, as the user with all rights."""
        return f"rabbit://kilonova:{self.password}@{self.address}:{self.port}/"

    def host_url(self, host: str) -> str:
        """Return the URL with the user of a host, whose rights are narrow."""
        return f"rabbit://{broker_names.user_of(host)}:{self._derive_password(host)}@{self.address}:{self.port}/"

    def role_url(self, role: str) -> str:
        """Return the URL with the user of a role of the control plane."""
        return (
            f"rabbit://{broker_names.user_of_role(role)}:{self._derive_password(f'role {role}')}"
            f"@{self.address}:{self.port}/"
        )

    def _derive_password(self, host: str) -> str:
        return hmac.new(self.password.encode(), host.encode(), hashlib.sha256).hexdigest()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for the node, its port mapper and rabbitmqctl.

        They replace the configuration files in /etc/rabbitmq. With TLS the address and port of AMQP
        are left out, because then only the listener in rabbitmq.conf may exist.
        """
        return {
            "HOME": str(self.folder),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C.UTF-8",
            "RABBITMQ_NODENAME": "kilonova@localhost",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            # Without this variable the node also reads /etc/rabbitmq/conf.d.
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
        """Make the folder and the configuration.

        Returns:
            True if the file with the users is new or changed. If the node runs already, the caller
            then calls ``learn_users``. False if ``self.hosts`` is empty, because then the broker
            has no such file.

        Raises:
            Failure: RabbitMQ is not installed.
        """
        if not (SCRIPTS / "rabbitmq-server").exists():
            raise Failure(
                "RabbitMQ is not installed.", "Install the Debian package rabbitmq-server."
            )
        for folder in (self.folder, self.folder / "data", self.folder / "log"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._set_owner(folder)
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
        """Return the lines of rabbitmq.conf for the listener, with TLS if the node has ``proof``.

        With TLS also copy the certificate's files into the node's folder. Clients authenticate with
        a password. A client's certificate is optional, and must be from the same authority.
        """
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
        """Import the users and their rights into the running node.

        Raises:
            Failure: The node does not run, or refuses the import.
            TimeoutExpired: The import did not end within ``CONTROL_SECONDS``.
        """
        self.control("import_definitions", str(self._users))

    def _write(self, name: str, text: str) -> None:
        """Replace a file in the node's folder.

        The file is never opened for writing in place, because the node owns the folder and may have
        put a link there.
        """
        path = self.folder / name
        part = path.with_name(f"{name}.new")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            self._set_owner(file.fileno())
        part.replace(path)

    def _set_owner(self, file: Path | int) -> None:
        """Give a file to the node's user if this process is root.

        A symbolic link is not followed, because the node may have made the link.
        """
        if os.geteuid() == 0:
            user = pwd.getpwnam(USER)
            os.chown(
                file,
                user.pw_uid,
                user.pw_gid,
                **({} if isinstance(file, int) else {"follow_symlinks": False}),
            )

    def mapper_command(self) -> list[str]:
        """Return the command that runs the port mapper in the foreground.

        The port mapper must run before the node starts.
        """
        return [
            shutil.which("epmd", path="/usr/bin:/usr/local/bin") or "epmd",
            "-port",
            str(self.port + 2),
            "-address",
            "127.0.0.1",
        ]

    def command(self) -> list[str]:
        """Return the command that runs the node in the foreground."""
        return [str(SCRIPTS / "rabbitmq-server")]

    def count_published(self) -> int:
        """Return the number of messages that clients published to this node since its start.

        Raises:
            Failure: The node does not run.
            TimeoutExpired: The node did not answer within ``CONTROL_SECONDS``.
        """
        return int(
            self.control(
                "eval",
                "lists:sum([maps:get(messages_received_total, C, 0) || C <- maps:values("
                "rabbit_global_counters:overview())]).",
            ).strip()
        )

    def control(
        self,
        *arguments: str,
        seconds: float = CONTROL_SECONDS,
        stdin: IO[str] | int = subprocess.DEVNULL,
    ) -> str:
        """Run rabbitmqctl against this node and return the output.

        Raises:
            Failure: The command ends with an error.
            TimeoutExpired: The command did not end within ``seconds``.
        """
        done = subprocess.run(
            [str(SCRIPTS / "rabbitmqctl"), *arguments],
            env=self.environment,
            timeout=seconds,
            stdin=stdin,
            capture_output=True,
            text=True,
            check=False,
            user=USER if os.geteuid() == 0 else None,
            cwd=self.folder,
        )
        if done.returncode != 0:
            raise Failure(
                f"rabbitmqctl {arguments[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}",
                f"See rabbitmq.log, the output of the node in {self.folder}.",
            )
        return done.stdout


def definitions(broker: Broker) -> str:
    """Return the users and their rights as JSON, which the node loads at the start.

    Each host and each role has a user with narrow rights. The user kilonova has all rights, for
    operators.
    """
    users = [
        identities.of_operator("kilonova", broker.password),
        *(identities.of_host(host, broker._derive_password(host)) for host in broker.hosts),
        *(
            identities.of_role(role, broker._derive_password(f"role {role}"))
            for role in broker_names.ROLES
        ),
    ]
    # A node that loads definitions at its first start makes no virtual host by itself.
    virtual_host = {"vhosts": [{"name": "/"}]}
    return json.dumps(identities.definitions(users) | virtual_host, indent=1) + "\n"
