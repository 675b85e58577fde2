# SPDX-License-Identifier: Apache-2.0
"""``kilonova config check``: checks the configuration and each external service in it.

The output has one line per service. For a host's file (``--agent``) the command checks the broker,
with the host's own keys, and libvirt. For the control plane the command checks database, broker,
identity service, roles of Kilonova's user, image service and network service. Nothing is changed.
Status 1: a check failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from oslo_config import cfg

from common import access
from common.clients import vendor_data
from common.domain import errors
from common.service import config

#: The timeout of an external service.
SECONDS = 10.0
#: For their purpose see docs/external-services.md.
WANTED_ROLES = {"service", "admin"}
Look = Callable[[cfg.ConfigOpts], str]


def check(options: argparse.Namespace) -> int:
    """Check the configuration, then the services. Return 1 if a service does not work, else 0.

    With ``--no-external-services`` only the configuration is checked.

    Raises:
        ConfigError: An option, a policy rule or the vendor data is wrong.
    """
    is_agent = options.agent or Path(options.config or "").name == Path(config.AGENT_FILE).name
    conf = config.load(options.config, config.AGENT if is_agent else "")
    if not is_agent:
        _check_policies(conf)
    vendor_data.configured(conf)
    print("the options are fine")
    if options.no_external_services:
        return 0
    failed = 0
    for name, look in (OF_HOST if is_agent else OF_CONTROL_PLANE).items():
        try:
            print(f"{name}: works: {look(conf)}")
        except (errors.ConfigError, errors.Problem, ValueError) as problem:
            failed += 1
            print(f"{name}: does not work: {' '.join(str(problem).split())}")
    return min(1, failed)


def _check_policies(conf: cfg.ConfigOpts) -> None:
    from compute_api.compute.policies import COMPUTE_RULES
    from compute_api.http.policy import load_policy
    from compute_api.placement.policies import PLACEMENT_RULES

    load_policy(conf, "api", COMPUTE_RULES)
    load_policy(conf, "placement", PLACEMENT_RULES)


def database(conf: cfg.ConfigOpts) -> str:
    """Check the database, and return its kind and the version of its schema.

    Raises:
        Problem: The database does not answer.
        ConfigError: The database refuses the connection, or has a version that this code cannot
            use.
    """
    from common.store import upgrades
    from common.store.engine import Store
    from common.store.version import find_needed, is_usable, remedy

    access.database(conf)
    store = Store.open(conf, pool=1)
    try:
        present = upgrades.version(store)
    finally:
        store.close()
    if not is_usable(present):
        raise errors.ConfigError(
            f"the database has version {present or 'none'}, this code needs {find_needed()}. {remedy(present)}"
        )
    return f"{store.dialect_name}, version {present}"


def broker(conf: cfg.ConfigOpts) -> str:
    """Connect to the broker, and return the user and host name of each configured node.

    Raises:
        ConfigError: The broker refuses the connection, or its options are wrong.
        Unavailable: The broker does not answer, or no broker is configured.
    """
    from common.rpc.broker import address_of

    access.broker(conf)
    return ", ".join(f"{node.username} at {node.hostname}" for node in address_of(conf).hosts)


def identity(conf: cfg.ConfigOpts) -> str:
    """Return Kilonova's user after a login and a check of the user's roles.

    Raises:
        ConfigError: The identity service refuses the login, the user lacks a role, or a configured
            URL is plain HTTP to another machine.
        Problem: The identity service does not answer, or answers with another error.
    """
    from common.clients.identity import IdentityClient

    client = IdentityClient(conf, wait=SECONDS)
    client.look_in()
    lacking = sorted(WANTED_ROLES - {role.lower() for role in client.roles()})
    if lacking:
        user, project = conf.identity.username, conf.identity.project_name
        commands = "; ".join(
            f"openstack role add --user {user} --project {project} {role}" for role in lacking
        )
        raise errors.ConfigError(
            f"user {client.describe_user()} lacks {' and '.join(lacking)}. Run: {commands} "
            "(docs/external-services.md)"
        )
    return f"user {client.describe_user()}"


def image(conf: cfg.ConfigOpts) -> str:
    """Return the URL of the image service after a successful request.

    Raises:
        ConfigError: A configured URL is plain HTTP to another machine.
        Problem: The identity service or the image service does not answer, or refuses the request.
            Or the catalogue names no image service.
    """
    from common.clients.identity import IdentityClient

    client = IdentityClient(conf, wait=SECONDS)
    return _check_service(client.image_url(), "/v2/images?limit=1", client.token(), "image")


def network(conf: cfg.ConfigOpts) -> str:
    """Check the network service and return the URL, or a notice if the catalogue has none.

    Raises:
        ConfigError: A configured URL is plain HTTP to another machine.
        Problem: The identity service or the network service does not answer, or refuses the
            request.
    """
    from common.clients.identity import IdentityClient

    client = IdentityClient(conf, wait=SECONDS)
    url = client.network_url()
    if url is None:
        return (
            "the catalogue names no network service, so servers have no networks. If that is not intended, "
            "register the service or set [network] endpoint"
        )
    return _check_service(url, "/v2.0/extensions", client.token(), "network")


def _check_service(url: str, path: str, token: str, section: str) -> str:
    """Send a GET request to a service with Kilonova's token, and return the service's base URL.

    Args:
        url: The service's URL. A version at the end is removed.
        path: The path of the request, behind the base URL.
        token: The token.
        section: The section of the configuration, which names the service in errors.

    Raises:
        Problem: The service does not answer, or answers with a status other than success.
    """
    from common.clients.http import Http, kind_of

    base = url.rstrip("/").removesuffix("/v2.0").removesuffix("/v2")
    answer = Http(f"{section} service", base, SECONDS).send("GET", base + path, token)
    if answer.status_code >= 300:
        raise kind_of(answer.status_code)(
            f"{base}{path} answers {answer.status_code}. Check that this is the {section} service ([{section}] "
            "endpoint, or else the catalogue), and that it accepts tokens of [identity] auth_url"
        )
    return base


def broker_of_host(conf: cfg.ConfigOpts) -> str:
    """Check the broker in the host's key file, and return the host and the path of the file.

    If the file names no broker, check the configured broker.

    Raises:
        ValueError: The key file cannot be used.
        ConfigError: The broker refuses the connection, or its options are wrong.
        Unavailable: The broker does not answer, or no broker is configured.
    """
    from common.rpc.broker import look_in
    from common.security.host_keys import OwnKeys

    path = Path(conf.agent.key_file or f"{conf.state_dir}/host.key")
    keys = OwnKeys.read(path, conf.host)
    look_in(conf, keys.transport_url or None, f"transport_url in {path}")
    return f"host {conf.host}, with the keys of {path}"


def libvirt(conf: cfg.ConfigOpts) -> str:
    """Return libvirt's URI and version, or a notice if the host uses another driver.

    Raises:
        ConfigError: The Python package of libvirt is missing, or libvirt refuses the call.
        NoAnswer: libvirt does not answer.
    """
    if conf.agent.driver != "libvirt":
        return f"not checked, because [agent] driver is {conf.agent.driver}"
    try:
        from compute_agent.verb_context import VerbFailed
        from compute_agent.virt.libvirt.domains.connection import Connection
    except ModuleNotFoundError as problem:
        raise errors.ConfigError(
            "libvirt-python is not installed; install kilonova with the extra agent"
        ) from problem

    try:
        version = Connection(conf.agent.libvirt_uri).ask("report its version", _version)
    except VerbFailed as problem:
        raise errors.ConfigError(
            f"libvirt at {conf.agent.libvirt_uri} refuses to report its version: {problem.details}."
        ) from problem
    return f"{conf.agent.libvirt_uri}, version {version}"


def _version(connection: object) -> str:
    number = int(connection.getLibVersion())  # type: ignore[attr-defined]  # libvirt ships no types
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


OF_CONTROL_PLANE: dict[str, Look] = {
    "database": database,
    "broker": broker,
    "identity": identity,
    "image": image,
    "network": network,
}
OF_HOST: dict[str, Look] = {"broker": broker_of_host, "libvirt": libvirt}
