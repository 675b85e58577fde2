# SPDX-License-Identifier: Apache-2.0
"""Keystone, Glance and Neutron as Debian packages them, on one machine: what an operator has before
Kilonova comes.

Networks are Neutron's own by its Linux bridge agents (vxlan), which any kernel with bridges can;
hosts get an agent each by ``join``. Every service has one worker: two processors serve all
machines.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.install.machines import ADDRESSES, Machine

CLOUD = ADDRESSES["cloud"]  #: stands in the catalogue
PASSWORD = "no-secret-in-a-test"
PACKAGES = (
    "mariadb-server",
    "rabbitmq-server",
    "keystone",
    "glance-api",
    "neutron-server",
    "neutron-linuxbridge-agent",
    "neutron-dhcp-agent",
    "neutron-metadata-agent",
    "python3-openstackclient",
    "python3-pymysql",
    "openssh-client",
)
HOST_PACKAGES = ("neutron-linuxbridge-agent",)
#: An admin's way to Keystone; files of it are sourced.
ADMIN = {
    "OS_AUTH_URL": f"http://{CLOUD}:5000/v3",
    "OS_USERNAME": "admin",
    "OS_PASSWORD": PASSWORD,
    "OS_PROJECT_NAME": "admin",
    "OS_USER_DOMAIN_NAME": "Default",
    "OS_PROJECT_DOMAIN_NAME": "Default",
    "OS_IDENTITY_API_VERSION": "3",
}
SERVICES = (("glance", "image", 9292), ("neutron", "network", 9696))
Sections = Mapping[str, Mapping[str, str | int]]


def install(machine: Machine) -> None:
    """Packages, databases, configuration, users and endpoints."""
    machine.install_idle(*PACKAGES)
    machine.shell("systemctl start mariadb rabbitmq-server")
    for name in ("keystone", "glance", "neutron"):
        machine.shell(
            f'mysql -e "create database {name}; '
            f"grant all on {name}.* to {name}@localhost identified by '{PASSWORD}'\""
        )
    machine.shell(f"rabbitmqctl -q add_user neutron {PASSWORD}")
    machine.shell("rabbitmqctl -q set_permissions neutron '.*' '.*' '.*'")
    machine.write("/root/admin", exported(), 0o600)
    _keystone(machine)
    _glance(machine)
    _neutron(machine)


def exported() -> str:
    """An admin's variables, to be sourced by a shell."""
    return "".join(f"export {name}={value}\n" for name, value in ADMIN.items())


def ini(sections: Sections) -> str:
    """A file in oslo.config's form."""
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in options.items())
        for name, options in sections.items()
    )


def _database(name: str) -> dict[str, str]:
    socket = "unix_socket=/run/mysqld/mysqld.sock"
    return {"connection": f"mysql+pymysql://{name}:{PASSWORD}@localhost/{name}?{socket}"}


def _as_service(name: str) -> dict[str, str]:
    return {
        "auth_url": f"http://{CLOUD}:5000",
        "auth_type": "password",
        "username": name,
        "password": PASSWORD,
        "project_name": "service",
        "user_domain_name": "Default",
        "project_domain_name": "Default",
    }


def _one_worker(machine: Machine, name: str, unit: str) -> None:
    machine.shell(f"sed -i 's/^processes.*/processes = 1/' /etc/{name}/{unit}-uwsgi.ini")


def _keystone(machine: Machine) -> None:
    token = {"provider": "fernet"}
    text = ini({"database": _database("keystone"), "token": token})
    machine.write("/etc/keystone/keystone.conf", text)
    _one_worker(machine, "keystone", "keystone")
    machine.shell("su -s /bin/sh keystone -c 'keystone-manage db_sync'")
    for kind in ("fernet_setup", "credential_setup"):
        machine.shell(f"keystone-manage {kind} --keystone-user keystone --keystone-group keystone")
    urls = " ".join(
        f"--bootstrap-{kind}-url {ADMIN['OS_AUTH_URL']}" for kind in ("admin", "internal", "public")
    )
    machine.shell(
        f"keystone-manage bootstrap --bootstrap-password {PASSWORD} {urls} "
        "--bootstrap-region-id RegionOne"
    )
    machine.shell("systemctl restart keystone")
    commands = ["project create service", "role create --or-show service"]
    for name, kind, port in SERVICES:
        commands += [
            f"user create --project service --password {PASSWORD} {name}",
            f"role add --project service --user {name} admin",
            f"service create --name {name} {kind}",
            *(
                f"endpoint create --region RegionOne {kind} {interface} http://{CLOUD}:{port}"
                for interface in ("public", "internal")
            ),
        ]
    openstack(machine, *commands)


def openstack(machine: Machine, *commands: str) -> str:
    """What the client prints of these commands, one after the other, as admin."""
    lines = "\n".join(f"openstack {command}" for command in commands)
    return machine.shell(f". /root/admin\n{lines}")


def _glance(machine: Machine) -> None:
    files = {"filesystem_store_datadir": "/var/lib/glance/images"}
    text = ini(
        {
            "DEFAULT": {"enabled_backends": "files:file"},
            "database": _database("glance"),
            "glance_store": {"default_backend": "files"},
            "files": files,
            "paste_deploy": {"flavor": "keystone"},
            "keystone_authtoken": _as_service("glance"),
        }
    )
    machine.write("/etc/glance/glance-api.conf", text)
    _one_worker(machine, "glance", "glance-api")
    machine.shell("su -s /bin/sh glance -c 'glance-manage db_sync'")
    machine.shell("systemctl restart glance-api")


def _neutron(machine: Machine) -> None:
    _neutron_conf(
        machine,
        {
            "database": _database("neutron"),
            "keystone_authtoken": _as_service("neutron"),
            "nova": _as_service("neutron"),
            "placement": _as_service("neutron"),
        },
    )
    plugin = {
        "type_drivers": "vxlan",
        "tenant_network_types": "vxlan",
        "mechanism_drivers": "linuxbridge",
        "extension_drivers": "port_security",
    }
    text = ini({"ml2": plugin, "ml2_type_vxlan": {"vni_ranges": "1:1000"}})
    machine.write("/etc/neutron/plugins/ml2/ml2_conf.ini", text)
    dhcp = {"interface_driver": "linuxbridge", "enable_isolated_metadata": "true"}
    machine.write("/etc/neutron/dhcp_agent.ini", ini({"DEFAULT": dhcp}))
    _one_worker(machine, "neutron", "neutron-api")
    files = "--config-file /etc/neutron/neutron.conf"
    files += " --config-file /etc/neutron/plugins/ml2/ml2_conf.ini"
    machine.shell(f"su -s /bin/sh neutron -c 'neutron-db-manage {files} upgrade head'")
    machine.shell("systemctl restart neutron-api neutron-rpc-server neutron-dhcp-agent")
    _linux_bridges(machine)


def _neutron_conf(machine: Machine, more: Sections) -> None:
    everywhere: dict[str, Mapping[str, str | int]] = {
        "DEFAULT": {
            "core_plugin": "ml2",
            "service_plugins": "",
            "transport_url": f"rabbit://neutron:{PASSWORD}@{CLOUD}",
            "rpc_workers": 1,
        },
        "oslo_concurrency": {"lock_path": "/var/lib/neutron/lock"},
        "agent": {"root_helper": "sudo neutron-rootwrap /etc/neutron/rootwrap.conf"},
        "experimental": {"linuxbridge": "true"},
    }
    machine.write("/etc/neutron/neutron.conf", ini({**everywhere, **more}))


def _linux_bridges(machine: Machine) -> None:
    vxlan = {"enable_vxlan": "true", "local_ip": machine.address, "vxlan_group": "239.1.1.1"}
    guard = {"enable_security_group": "true", "firewall_driver": "iptables"}
    machine.write(
        "/etc/neutron/plugins/ml2/linuxbridge_agent.ini",
        ini({"vxlan": vxlan, "securitygroup": guard}),
    )
    machine.shell("systemctl restart neutron-linuxbridge-agent")


def join(host: Machine) -> None:
    """Neutron's part of a host: a Linux bridge agent."""
    host.install_idle(*HOST_PACKAGES)
    _neutron_conf(host, {})
    _linux_bridges(host)
