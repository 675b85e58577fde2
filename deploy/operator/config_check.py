# SPDX-License-Identifier: Apache-2.0
"""``kilonova config check``: is the file right, and does each neighbour that it names work? One
line for each.

Of a host's file (``--agent``) the broker, with the host's own keys, and libvirt are asked; of the
control plane's the database, the broker, the identity service with our roles, and what its
catalogue names. Nothing is changed anywhere. Status 1: something does not work.
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

SECONDS = 10.0  #: for a neighbour's answer
#: docs/external-services.md says what for.
WANTED_ROLES = {"service", "admin"}
Look = Callable[[cfg.ConfigOpts], str]


def check(options: argparse.Namespace) -> int:
    """Read the configuration, then ask the neighbours; a wrong value or rule is raised as
    ConfigError."""
    is_agent = options.agent or Path(options.config or "").name == Path(config.AGENT_FILE).name
    conf = config.load(options.config, config.AGENT if is_agent else "")
    if not is_agent:
        _check_policies(conf)
    vendor_data.configured(conf)
    print("the options are fine")
    if options.no_neighbours:
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
    from compute_api.http.policy import configured
    from compute_api.placement.policies import PLACEMENT_RULES

    configured(conf, "api", COMPUTE_RULES)
    configured(conf, "placement", PLACEMENT_RULES)


def database(conf: cfg.ConfigOpts) -> str:
    """Its kind and version. Raises Problem: it does not answer, or has another version."""
    from common.store import upgrades
    from common.store.engine import Store
    from common.store.version import remedy

    access.database(conf)
    store = Store.opened(conf, pool=1)
    try:
        found, needed = upgrades.version(store), upgrades.newest()
    finally:
        store.close()
    if found != needed:
        raise errors.ConfigError(
            f"it has version {found or 'none'}, this code needs {needed}. {remedy(found)}"
        )
    return f"{store.dialect_name}, version {found}"


def broker(conf: cfg.ConfigOpts) -> str:
    """Who we are there."""
    from common.rpc.broker import address_of

    access.broker(conf)
    return ", ".join(f"{one.username} at {one.hostname}" for one in address_of(conf).hosts)


def identity(conf: cfg.ConfigOpts) -> str:
    """Our user and its roles. Raises ConfigError: it lacks some."""
    from common.clients.identity import IdentityClient

    known = IdentityClient(conf, wait=SECONDS)
    known.look_in()
    lacking = WANTED_ROLES - {role.lower() for role in known.roles()}
    if lacking:
        raise errors.ConfigError(
            f"user {known.describe_user()} lacks {' and '.join(sorted(lacking))}; run: openstack role add --user "
            f"{conf.identity.username} --project {conf.identity.project_name} {min(lacking)} "
            "(docs/external-services.md)"
        )
    return f"user {known.describe_user()}"


def image(conf: cfg.ConfigOpts) -> str:
    """Its URL."""
    from common.clients.identity import IdentityClient

    known = IdentityClient(conf, wait=SECONDS)
    return _asked(known.image_url(), "/v2/images?limit=1", known.token(), "image")


def network(conf: cfg.ConfigOpts) -> str:
    """Its URL, or that there is none."""
    from common.clients.identity import IdentityClient

    known = IdentityClient(conf, wait=SECONDS)
    url = known.network_url()
    if url is None:
        return (
            "there is none, so servers have no networks: register it, or set [network] endpoint, if "
            "that is not meant"
        )
    return _asked(url, "/v2.0/extensions", known.token(), "network")


def _asked(url: str, path: str, token: str, section: str) -> str:
    """The URL, when it answers our token with a success."""
    from common.clients.http import Http, kind_of

    base = url.rstrip("/").removesuffix("/v2.0").removesuffix("/v2")
    answer = Http(f"{section} service", base, SECONDS).send("GET", base + path, token)
    if answer.status_code >= 300:
        raise kind_of(answer.status_code)(
            f"{base}{path} answers {answer.status_code}; see that it is the {section} service ([{section}] "
            "endpoint, else the catalogue) and takes tokens of [identity] auth_url"
        )
    return base


def broker_of_host(conf: cfg.ConfigOpts) -> str:
    """The way in the host's key file. Raises ValueError: that cannot be used."""
    from common.rpc.broker import look_in
    from common.security.host_keys import OwnKeys

    path = Path(conf.agent.key_file or f"{conf.state_dir}/host.key")
    keys = OwnKeys.read(path, conf.host)
    look_in(conf, keys.transport_url or None, f"transport_url in {path}")
    return f"host {conf.host}, with the keys of {path}"


def libvirt(conf: cfg.ConfigOpts) -> str:
    """Its URI and version. Raises ConfigError: its Python package is missing."""
    if conf.agent.driver != "libvirt":
        return f"not asked, for [agent] driver is {conf.agent.driver}"
    try:
        from compute_agent.virt.libvirt.domains.connection import Connection
    except ModuleNotFoundError as problem:
        raise errors.ConfigError(
            "libvirt-python is not installed; install kilonova with the extra agent"
        ) from problem

    version = Connection(conf.agent.libvirt_uri).ask("tell its version", _version)
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
