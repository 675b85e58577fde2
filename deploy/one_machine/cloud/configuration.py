# SPDX-License-Identifier: Apache-2.0
"""The configuration files of one cloud on this machine: kilonova.conf and clouds.yaml.

``prepare`` in deploy/one_machine/cloud/lifecycle.py writes them at each start, because they follow
from the facts of the cloud. Invariant: only the owner can read files with secrets.
"""

from __future__ import annotations

import json

from common.security.broker_names import API, CONDUCTOR, CONSOLE, SCHEDULER
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.machine.libvirtd import uri

#: The roles that have configuration files of their own.
ROLES = (API, SCHEDULER, CONSOLE)
#: The port on which a host with a separate address receives live migrations.
LIVE_MIGRATION_PORT = 16598
HEAD = "# Made by deploy/up, which overwrites this file at each start. All options: deploy/samples/kilonova.conf\n"


def of_control_plane(cloud: Cloud, role: str = "") -> str:
    """Return the text of the configuration file of the control plane's processes.

    Invariant: no host may know the secrets. The files of ``ROLES`` do not contain the secrets for
    commands to hosts and for image tickets.

    Args:
        cloud: The cloud.
        role: A role of ``ROLES``, or "" for the file of all other processes, for example conductor
            and metadata, which use the broker as conductor.
    """
    sections: dict[str, dict[str, object]] = {
        "DEFAULT": {
            "host": cloud.hosts[0],
            "state_dir": cloud.state_folder(1),
            "transport_url": cloud.broker_url or Broker.of(cloud).role_url(role or CONDUCTOR),
            "secret_key": cloud.password("sealing"),
        },
        "database": {
            "url": cloud.store_url,
            "tls": cloud.database_url is None,
        },
        "tls": certificates.section(cloud, certificates.CONTROL),
        "api": {"host": cloud.address, "port": cloud.ports.api},
        "conductor": {
            "fencing_hook": cloud.fencing_hook,
            # A single host leaves no other destination.
            "allow_resize_to_same_host": len(cloud.hosts) == 1,
        },
        "host_keys": {
            "query_secret": cloud.password("queries"),
            **({} if role else {"command_secret": cloud.password("commands")}),
        },
        # The embedded services speak HTTP at an address of this machine.
        "identity": {
            "auth_url": cloud.identity_url,
            "password": cloud.password("kilonova"),
            **({"allow_plain_text": True} if cloud.is_joined else {}),
        },
        "metadata": {
            "host": cloud.address,
            "port": cloud.ports.metadata,
            "proxy_shared_secret": cloud.password("metadata"),
        },
        "console": {
            "host": cloud.address,
            "port": cloud.ports.console,
            "public_url": cloud.console_url,
        },
        "image_gateway": {
            "host": cloud.address,
            "port": cloud.ports.image_gateway,
            "url": cloud.image_gateway_url,
            **({} if role else {"ticket_secret": cloud.password("tickets")}),
        },
        "placement": {"host": cloud.address, "port": cloud.ports.placement},
    }
    for section, option, value in cloud.options:
        sections.setdefault(section, {})[option] = value
    return _format(sections)


def of_host(cloud: Cloud, host: str, number: int, virt_type: str = "auto") -> str:
    """Return the text of the configuration file of a host's agent.

    The URL of the broker is in the host's key file, unless the cloud has an external broker.

    Args:
        cloud: The cloud.
        host: The name of the host.
        number: The number of the host, counted from 1.
        virt_type: The virtualization of guests. "auto": the agent runs a probe guest.
    """
    return _format(
        {
            "DEFAULT": {
                "host": host,
                "state_dir": cloud.state_folder(number),
                **({"transport_url": cloud.broker_url} if cloud.broker_url else {}),
            },
            "agent": {
                "driver": cloud.driver,
                "virt_type": virt_type,
                "libvirt_uri": uri(cloud.libvirt_folder(number)),
                "console_host": cloud.host_address(number),
                **(
                    {"volume_folders": cloud.volume_folder / "volumes"}
                    if cloud.volumes and not cloud.apart
                    else {}
                ),
            },
            "migration": _migration(cloud, number),
            "tls": certificates.section(cloud, host),
        }
    )


def _format(sections: dict[str, dict[str, object]]) -> str:
    return HEAD + "\n".join(
        f"[{name}]\n"
        + "".join(f"{key} = {_format_value(value)}\n" for key, value in options.items())
        for name, options in sections.items()
    )


def _format_value(value: object) -> str:
    """Return a value as text with "$" doubled. oslo.config would replace "$name" by an option."""
    return str(value).replace("$", "$$")


def _migration(cloud: Cloud, number: int) -> dict[str, object]:
    """Return the options of [migration] for a host, counted from 1.

    If the hosts have network namespaces (``Cloud.is_joined``), they migrate servers to each other.
    Otherwise a host listens only on 127.0.0.1, at a free port for files.
    """
    if cloud.is_joined:
        return {
            "live_migration_port": LIVE_MIGRATION_PORT,
            "live_migration_with_native_tls": True,
            "live_migration_inbound_addr": cloud.host_address(number),
        }
    return {"live_migration_inbound_addr": "127.0.0.1", "transfer_port": 0}


def clouds(cloud: Cloud) -> str:
    """Return the text of clouds.yaml for the users demo and admin.

    The text is JSON, which is valid YAML and needs no YAML quoting.
    """

    def entry(user: str, project: str) -> dict[str, object]:
        auth = {
            "auth_url": cloud.identity_url,
            "username": user,
            "password": cloud.password(user),
            "project_name": project,
            "user_domain_name": "Default",
            "project_domain_name": "Default",
        }
        return {"auth": auth, "region_name": "RegionOne", "identity_api_version": 3}

    return (
        json.dumps(
            {
                "clouds": {
                    "kilonova": entry("demo", "demo"),
                    "kilonova-admin": entry("admin", "admin"),
                }
            },
            indent=1,
        )
        + "\n"
    )
