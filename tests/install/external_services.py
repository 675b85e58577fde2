# SPDX-License-Identifier: Apache-2.0
"""Keystone, Glance and Neutron from Debian packages on one machine.

These are the external services of an operator before Kilonova is installed. Networks are vxlan
networks of Neutron's Linux bridge agents, which need no special kernel. ``join`` installs an agent
on a host. Every service has one worker, because all machines share two processors.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.install.machines import ADDRESSES, Machine

#: The address of the services in the catalogue.
CLOUD = ADDRESSES["cloud"]
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
#: Variables with which an admin's client reaches Keystone.
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
    """Install the services with their databases, configuration, users and endpoints."""
    machine.install_idle(*PACKAGES)
    machine.shell("systemctl start mariadb rabbitmq-server")
    for name in ("keystone", "glance", "neutron"):
        machine.shell(
            f'mysql -e "create database {name}; '
            f"grant all on {name}.* to {name}@localhost identified by '{PASSWORD}'\""
        )
    machine.shell(f"rabbitmqctl -q add_user neutron {PASSWORD}")
    machine.shell("rabbitmqctl -q set_permissions neutron '.*' '.*' '.*'")
    machine.write("/root/admin", format_admin_environment(), 0o600)
    _install_keystone(machine)
    _install_glance(machine)
    _install_neutron(machine)


def format_admin_environment() -> str:
    """Return a shell script that exports an admin's variables."""
    return "".join(f"export {name}={value}\n" for name, value in ADMIN.items())


def format_ini(sections: Sections) -> str:
    """Return the text of a configuration file in the format of oslo.config."""
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in options.items())
        for name, options in sections.items()
    )


def _make_database_options(name: str) -> dict[str, str]:
    socket = "unix_socket=/run/mysqld/mysqld.sock"
    return {"connection": f"mysql+pymysql://{name}:{PASSWORD}@localhost/{name}?{socket}"}


def _make_service_options(name: str) -> dict[str, str]:
    return {
        "auth_url": f"http://{CLOUD}:5000",
        "auth_type": "password",
        "username": name,
        "password": PASSWORD,
        "project_name": "service",
        "user_domain_name": "Default",
        "project_domain_name": "Default",
    }


def _set_one_worker(machine: Machine, name: str, unit: str) -> None:
    machine.shell(f"sed -i 's/^processes.*/processes = 1/' /etc/{name}/{unit}-uwsgi.ini")


def _install_keystone(machine: Machine) -> None:
    token = {"provider": "fernet"}
    text = format_ini({"database": _make_database_options("keystone"), "token": token})
    machine.write("/etc/keystone/keystone.conf", text)
    _set_one_worker(machine, "keystone", "keystone")
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
    """Run commands of the OpenStack client as admin in turn, and return their output."""
    lines = "\n".join(f"openstack {command}" for command in commands)
    return machine.shell(f". /root/admin\n{lines}")


def _install_glance(machine: Machine) -> None:
    files = {"filesystem_store_datadir": "/var/lib/glance/images"}
    text = format_ini(
        {
            "DEFAULT": {"enabled_backends": "files:file"},
            "database": _make_database_options("glance"),
            "glance_store": {"default_backend": "files"},
            "files": files,
            "paste_deploy": {"flavor": "keystone"},
            "keystone_authtoken": _make_service_options("glance"),
        }
    )
    machine.write("/etc/glance/glance-api.conf", text)
    _set_one_worker(machine, "glance", "glance-api")
    machine.shell("su -s /bin/sh glance -c 'glance-manage db_sync'")
    machine.shell("systemctl restart glance-api")


def _install_neutron(machine: Machine) -> None:
    _write_neutron_conf(
        machine,
        {
            "database": _make_database_options("neutron"),
            "keystone_authtoken": _make_service_options("neutron"),
            "nova": _make_service_options("neutron"),
            "placement": _make_service_options("neutron"),
        },
    )
    plugin = {
        "type_drivers": "vxlan",
        "tenant_network_types": "vxlan",
        "mechanism_drivers": "linuxbridge",
        "extension_drivers": "port_security",
    }
    text = format_ini({"ml2": plugin, "ml2_type_vxlan": {"vni_ranges": "1:1000"}})
    machine.write("/etc/neutron/plugins/ml2/ml2_conf.ini", text)
    dhcp = {"interface_driver": "linuxbridge", "enable_isolated_metadata": "true"}
    machine.write("/etc/neutron/dhcp_agent.ini", format_ini({"DEFAULT": dhcp}))
    _set_one_worker(machine, "neutron", "neutron-api")
    files = "--config-file /etc/neutron/neutron.conf"
    files += " --config-file /etc/neutron/plugins/ml2/ml2_conf.ini"
    machine.shell(f"su -s /bin/sh neutron -c 'neutron-db-manage {files} upgrade head'")
    machine.shell("systemctl restart neutron-api neutron-rpc-server neutron-dhcp-agent")
    _configure_linux_bridges(machine)


def _write_neutron_conf(machine: Machine, more: Sections) -> None:
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
    machine.write("/etc/neutron/neutron.conf", format_ini({**everywhere, **more}))


def _configure_linux_bridges(machine: Machine) -> None:
    vxlan = {"enable_vxlan": "true", "local_ip": machine.address, "vxlan_group": "239.1.1.1"}
    guard = {"enable_security_group": "true", "firewall_driver": "iptables"}
    machine.write(
        "/etc/neutron/plugins/ml2/linuxbridge_agent.ini",
        format_ini({"vxlan": vxlan, "securitygroup": guard}),
    )
    machine.shell("systemctl restart neutron-linuxbridge-agent")


def join(host: Machine) -> None:
    """Install Neutron's Linux bridge agent on a host."""
    host.install_idle(*HOST_PACKAGES)
    _write_neutron_conf(host, {})
    _configure_linux_bridges(host)
