# SPDX-License-Identifier: Apache-2.0
"""The configuration of the processes and the clients of one cloud on this machine: kilonova.conf,
clouds.yaml.

Used by ``prepare`` in deploy/one_machine/cloud/lifecycle.py, which writes them again at each
start: everything follows from the facts of the cloud. Must stay true: what holds a secret is
readable to its owner only.
"""

from __future__ import annotations

import json

from common.security.broker_names import API, CONDUCTOR, CONSOLE, SCHEDULER
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.machine.libvirtd import uri

#: Those that have a file of their own.
ROLES = (API, SCHEDULER, CONSOLE)
#: Where a host with an address of its own takes servers in that move while they run.
LIVE_MIGRATION_PORT = 16598
HEAD = "# Made by deploy/up, which writes it again. Every option: deploy/samples/kilonova.conf\n"


def of_control_plane(cloud: Cloud, role: str = "") -> str:
    """The file of all processes but the agents; at the broker they have the name of this role, or
    of a conductor. What it has no host may know; only conductors have what makes commands and
    tickets for images."""
    sections: dict[str, dict[str, object]] = {
        "DEFAULT": {
            "host": cloud.hosts[0],
            "state_dir": cloud.state_folder(1),
            "transport_url": cloud.broker_url or Broker.of(cloud).role_url(role or CONDUCTOR),
            "secret_key": cloud.password("sealing"),
        },
        "database": {
            "url": cloud.database_url or f"sqlite:///{cloud.home}/data/kilonova.db",
            "tls": cloud.database_url is None,
        },
        "tls": certificates.section(cloud, certificates.CONTROL),
        "api": {"host": cloud.address, "port": cloud.ports.api},
        # where else could it be resized
        "conductor": {
            "fencing_hook": cloud.fencing_hook,
            "allow_resize_to_same_host": len(cloud.hosts) == 1,
        },
        "host_keys": {
            "query_secret": cloud.password("queries"),
            **({} if role else {"command_secret": cloud.password("commands")}),
        },
        # The services that stand in for others speak HTTP at an address of this machine.
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
    return _text(sections)


def of_host(cloud: Cloud, host: str, number: int) -> str:
    """The file of the agent of the cloud's first, second … host; its way to the broker is in its
    key file, unless all share one."""
    return _text(
        {
            "DEFAULT": {
                "host": host,
                "state_dir": cloud.state_folder(number),
                **({"transport_url": cloud.broker_url} if cloud.broker_url else {}),
            },
            "agent": {
                "driver": cloud.driver,
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


def _text(sections: dict[str, dict[str, object]]) -> str:
    return HEAD + "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_literal(value)}\n" for key, value in options.items())
        for name, options in sections.items()
    )


def _literal(value: object) -> str:
    """oslo.config would put another option's value where a "$" stands, as one may in a URL's
    password."""
    return str(value).replace("$", "$$")


def _migration(cloud: Cloud, number: int) -> dict[str, object]:
    """Servers move between hosts that have addresses of their own also while they run; others share
    127.0.0.1."""
    if cloud.is_joined:
        return {
            "live_migration_port": LIVE_MIGRATION_PORT,
            "live_migration_with_native_tls": True,
            "live_migration_inbound_addr": cloud.host_address(number),
        }
    return {"live_migration_inbound_addr": "127.0.0.1", "transfer_port": 0}


def clouds(cloud: Cloud) -> str:
    """clouds.yaml, of the users demo and admin. JSON is YAML: nothing needs quoting rules of its
    own."""

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
