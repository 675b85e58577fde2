# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-api: the application with its real services.

The master process reads the configuration. For several workers the master also imports the code
that they share. For a single worker this would only keep a second copy in memory. Each worker
creates its own store, broker connection and threads after the fork.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from wsgiref.types import WSGIApplication

from oslo_config import cfg

from common import access
from common.service import service
from compute_api.compute.policies import COMPUTE_RULES
from compute_api.compute.request import waiting_threads
from compute_api.http.policy import Policy, load_policy
from compute_api.http.worker.server import Server, limits

if TYPE_CHECKING:
    from common.clients.identity import IdentityClient
    from common.clients.image import ImageClient as ImageClient
    from common.clients.network_records import Records as Records
    from common.clients.shares import ShareClient as ShareClient
    from common.clients.volumes import VolumeClient as VolumeClient
    from compute_api.compute.request.dependencies import ApiSettings

#: Modules that the master imports for several workers.
_SHARED = (
    "compute_api.compute.app",
    "compute_api.http.authentication",
    "common.rpc.agent",
    "common.rpc.conductor",
    "common.clients.identity",
)

#: Seconds for which a request waits at most for an external service. If the service hangs, the user
#: gets 503 within ten seconds.
PATIENCE = 8.0
_opened = ExitStack()


def application(conf: cfg.ConfigOpts, policy: Policy | None = None) -> WSGIApplication:
    """Return the API's WSGI application with authentication, health checks and all its clients.

    Call this in the worker process. ``_opened.close`` closes the connections.

    Args:
        conf: The configuration.
        policy: The policy that the master has read, or None to read the policy now.

    Raises:
        ConfigError: The configuration is invalid.
    """
    from common.clients import limits
    from common.clients.identity import IdentityClient
    from common.rpc import agent, conductor
    from common.rpc.broker import opener, require_answer
    from common.rpc.host_link import ControlSide
    from common.rpc.transport import Transport
    from common.security import secret_lists
    from common.security.broker_names import API
    from common.security.vault import Vault
    from common.service.notification_options import NotificationSettings
    from common.store.engine import Store
    from common.store.hosts import host_keys
    from common.store.version import guard
    from compute_api.compute import app, faults
    from compute_api.compute.request.dependencies import Services
    from compute_api.http import authentication, fair_share, health
    from compute_api.http.health import Dependency

    store = guard(
        Store.open(conf, pool=conf.api.threads, notifications=NotificationSettings.of(conf))
    )
    transport, link = (
        Transport(conf, role=API),
        ControlSide(opener(conf), host_keys.of_all(store, conf), role=API),
    )
    for resource in (store, link, transport):
        _opened.callback(resource.close)
    identity = IdentityClient(conf)
    vault = Vault(conf.secret_key) if secret_lists.split(conf.secret_key) else None
    keystone = limits.configured(conf)
    if keystone is not None:
        _opened.callback(keystone.close)
    services = Services(
        store,
        conductor.ConductorWakeup(transport),
        agent.AgentClient(link),
        image_client(identity),
        settings(conf),
        vault,
        network_client(conf, identity),
        keystone,
        share_client(conf, identity),
        volume_client(conf, identity),
    )
    api = app.create(services, policy or load_policy(conf, "api", COMPUTE_RULES))
    dependencies = (
        Dependency("database", store.now),
        Dependency("identity", identity.require_answer),
        Dependency("broker", partial(require_answer, opener(conf)), required=False),
    )
    return health.add_health_checks(
        authentication.authenticate(fair_share.limit_projects(api, faults.body), conf, faults.body),
        health.Health(dependencies),
    )


def image_client(identity: IdentityClient) -> ImageClient:
    """Return the client for the image service with tenants' tokens.

    The client's ``show`` refuses an image that Kilonova's own user cannot read, because hosts
    download images through this user.
    """
    from common.clients.image import ImageClient
    from common.clients.own_images import OwnImages

    require = OwnImages(identity, timeout=PATIENCE).require_readable
    return ImageClient(identity.image_url, timeout=PATIENCE, require=require)


def network_client(conf: cfg.ConfigOpts, identity: IdentityClient) -> Records:
    """Return the client for the network service."""
    from common.clients.network_records import Records

    return Records(identity.network_url, min(conf.network.timeout, PATIENCE))


def share_client(conf: cfg.ConfigOpts, identity: IdentityClient) -> ShareClient:
    """Return the client for the shared file system service."""
    from common.clients.shares import ShareClient

    return ShareClient(identity.share_url, min(conf.share.timeout, PATIENCE))


def volume_client(conf: cfg.ConfigOpts, identity: IdentityClient) -> VolumeClient:
    """Return the client for the block storage service."""
    from common.clients.volumes import VolumeClient

    return VolumeClient(identity.volume_url, min(conf.volume.timeout, PATIENCE))


def settings(conf: cfg.ConfigOpts) -> ApiSettings:
    """Return the options that handlers need from the configuration."""
    from compute_api.compute.request.dependencies import ApiSettings
    from compute_api.compute.request.quota import UnregisteredLimits

    return ApiSettings(
        max_limit=conf.api.max_limit,
        max_body_bytes=conf.api.max_body,
        public_url=conf.api.public_url,
        default_zone=conf.scheduler.default_availability_zone,
        default_schedule_zone=conf.scheduler.default_schedule_zone,
        pci_aliases=conf.api.pci_alias,
        threads=conf.api.threads,
        reclaim_interval=conf.reclaim_instance_interval,
        console_url=conf.console.public_url,
        console_token_seconds=conf.console.token_seconds,
        spice_direct_url=conf.spice.direct_proxy_base_url,
        fencing=bool(conf.conductor.fencing_hook),
        max_local_disks=conf.max_local_block_devices,
        cross_az_attach=conf.volume.cross_az_attach,
        quota={
            name: conf.quota[name]
            for name in conf.quota
            if name != "driver" and "unified" not in name
        },
        unregistered=UnregisteredLimits(
            conf.quota.unified_limits_resource_strategy,
            tuple(conf.quota.unified_limits_resource_list),
        ),
    )


def _check_quota(conf: cfg.ConfigOpts) -> None:
    """Raise ConfigError if [quota] driver is "unified" and oslo.limit cannot be used."""
    from common.clients import limits

    keystone = limits.configured(conf)
    if keystone is not None:
        keystone.close()


def _build_fault(status: int, text: str) -> object:
    from compute_api.compute import faults

    return faults.body(status, text)


def main() -> None:
    """Run the console script kilonova-api."""
    conf = service.start("api")
    policy = (
        service.exit_on_config_error("api", lambda: load_policy(conf, "api", COMPUTE_RULES))
        if conf.api.policy_file
        else None
    )
    service.exit_on_config_error("api", lambda: _check_quota(conf))
    if conf.api.workers > 1:
        for name in _SHARED:
            importlib.import_module(name)
        gc.freeze()
    Server(
        "kilonova-api",
        conf.api.host,
        conf.api.port,
        lambda: application(conf, policy),
        _opened.close,
        workers=conf.api.workers,
        threads=conf.api.threads,
        limits=limits(conf, conf.api.max_body),
        fault=_build_fault,
        check=lambda: access.check(conf, access.DATABASE, access.BROKER, access.IDENTITY),
        may_wait=waiting_threads.may_wait,
        waiting_threads=conf.api.threads * waiting_threads.PER_THREAD,
        shares_threads=True,
    ).run()


if __name__ == "__main__":
    main()
