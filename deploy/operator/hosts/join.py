# SPDX-License-Identifier: Apache-2.0
"""``kilonova join TOKEN``: this machine becomes the host that ``kilonova host add`` named.

Everything that can be refused is looked at before the token is used. Killed after that, it has
written nothing or a part: ``kilonova host add`` then prints another token, and this is run again.
It knows no user of the cloud, so the guest that proves the host is made on the controller:
``kilonova host prove``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oslo_config import cfg

from common.domain import errors
from common.rpc.broker import address_of, look_in, opener, url_as
from common.rpc.host_credentials import HostJoinsClient, Identity, TokenState
from common.rpc.host_link import HostSide
from common.security import broker_names
from common.security.certificates import NewKey
from common.security.host_joins import JoinToken
from common.security.host_keys import NotGenuine, OwnKeys, Purpose
from common.security.private_files import replace
from common.service import config
from deploy.operator.hosts import join_checks
from deploy.operator.hosts.join_files import Owner, merged

TRIES, PAUSE_SECONDS = 3, 2.0  #: for an answer that was lost
HEARD_SECONDS = 60.0  #: until the control plane hears an agent that was started
_NOT_YET = ("ca_file", "cert_file", "key_file")  #: of [tls]: what the file names is not there yet
CA = "ca.pem"  #: beside agent.conf
CERTIFICATE = "host.pem"  #: in state_dir, where the agent puts the next one


@dataclass(frozen=True)
class Place:
    """Where things go on this host, and whose they are."""

    path: Path
    owner: Owner
    token: JoinToken

    def options(self, address: str = "", certificate: str = "") -> dict[str, dict[str, str]]:
        """What stands in agent.conf afterwards; ``certificate``: its path, where there is one."""
        made: dict[str, dict[str, str]] = {"DEFAULT": {"host": self.token.host}}
        if address:
            made["migration"] = {"live_migration_inbound_addr": address}
        secured = {}
        if self.token.ca:
            secured["ca_file"] = str(self.beside(CA))
        if certificate:
            secured["cert_file"] = certificate
        if self.token.allow_plain_text:
            secured["allow_plain_text"] = "true"
        return made | ({"tls": secured} if secured else {})

    def beside(self, name: str) -> Path:
        return self.path.parent / name


def join(options: argparse.Namespace) -> int:
    """Check, use the token, write, start."""
    try:
        text = sys.stdin.read() if options.token == "-" else options.token  # noqa: S105 - stands for standard input
        token = JoinToken.read(text)
    except ValueError as problem:
        raise errors.ConfigError(str(problem)) from problem
    path = Path(options.config or config.AGENT_FILE).absolute()
    place = Place(path, Owner.named(options.user), token)
    if not options.no_start:
        join_checks.unit()
    with tempfile.TemporaryDirectory() as folder, _asking(place, Path(folder)) as (conf, client):
        looked = _look(conf, token, client)
        address = _checked(options, place, conf, looked)
        certificate = _certificate(options, place, Path(folder), looked, address)
        is_secured = certificate or looked.signs
        own = str(_certificate_file(conf)) if is_secured else ""
        texts = merged(path, place.options(address, own))
        _use(place, conf, client, texts, certificate)
        if options.no_start:
            print(f"{path} is written. Start kilonova-agent with it")
        else:
            start_agent(client)
    print(f"Then, on the controller: kilonova host prove {token.host}")
    return 0


@contextmanager
def _asking(place: Place, folder: Path) -> Iterator[tuple[cfg.ConfigOpts, HostJoinsClient]]:
    """The configuration that the agent will have, as far as it is known, and who asks conductors.
    It is read from a copy, so that nothing is written here yet."""
    trial, authority = folder / config.AGENT_FILE.rpartition("/")[2], folder / CA
    trial.write_text(merged(place.path, place.options()))
    authority.write_text(place.token.ca)
    conf = config.load(str(trial), config.AGENT)
    for name in _NOT_YET:
        known = str(authority) if name == "ca_file" and place.token.ca else ""
        conf.set_override(name, known, group="tls")
    token = place.token
    connect = opener(conf, token.transport_url)
    link = HostSide(connect, token.keys, token.host, purpose=Purpose.JOIN)
    try:
        yield conf, HostJoinsClient(link)
    finally:
        link.close()
        for name in _NOT_YET:
            conf.clear_override(name, group="tls")


def _look(conf: cfg.ConfigOpts, token: JoinToken, client: HostJoinsClient) -> TokenState:
    """How the token stands, while the clocks are compared. Raises ConfigError: it opens nothing."""
    look_in(conf, token.transport_url, "the token")  # whose refusal says why
    try:
        found, said = join_checks.clock(client.look)
    except errors.NoAnswer as problem:
        raise errors.ConfigError(
            f"the broker answers, and no conductor does: none runs (kilonova status, on the controller), or the "
            f"token was replaced, or host {token.host} was removed: kilonova host add {token.host} prints another"
        ) from problem
    if found.refusal:
        raise errors.ConfigError(found.refusal)
    _tell("broker", address_of(conf, token.transport_url).hosts[0].hostname)
    _tell("clock", said)
    return found


def _checked(
    options: argparse.Namespace, place: Place, conf: cfg.ConfigOpts, looked: TokenState
) -> str:
    """Look at the machine; returns its address."""
    token = place.token
    address = join_checks.address(
        options.address,
        looked.address,
        conf.migration.live_migration_inbound_addr,
        address_of(conf, token.transport_url),
    )
    _tell("address", address)
    for name, check in (
        ("libvirt", join_checks.libvirt),
        ("guests", join_checks.acceleration),
        ("space", join_checks.space),
    ):
        _tell(name, check(conf))
    _require_own_keys(_key_file(conf), token.host)
    return address


def _require_own_keys(path: Path, host: str) -> None:
    """Raises ConfigError: this machine is another host, whose guests are here."""
    try:
        other = json.loads(path.read_text())["host"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        other = "(it cannot be read)"
    if other != host:
        raise errors.ConfigError(
            f"this machine has the keys of host {other} in {path}: if it is to be another host, stop kilonova-agent, "
            f"kilonova host remove {other} on the controller, and move its state_dir {path.parent} away"
        )


def _certificate_file(conf: cfg.ConfigOpts) -> Path:
    return Path(conf.state_dir) / CERTIFICATE


def _key_file(conf: cfg.ConfigOpts) -> Path:
    return Path(conf.agent.key_file or f"{conf.state_dir}/host.key")


def _certificate(
    options: argparse.Namespace, place: Place, folder: Path, looked: TokenState, address: str
) -> str:
    """The one that the operator brings, with its key (PEM); empty: none is needed, or it comes with
    the identity."""
    if not place.token.ca or looked.signs:
        if options.cert_file:
            raise errors.ConfigError(
                "--cert-file is not needed: "
                + (
                    "a certificate comes with the token"
                    if place.token.ca
                    else "this cloud has no TLS"
                )
            )
        return ""
    if not options.cert_file:
        raise errors.ConfigError(
            f"this cloud has TLS, and no certificate comes with the token: --cert-file FILE, one of the cloud's "
            f"authority that names {address}; or set [tls] ca_key_file where conductors run, and add the host "
            f"with --address {address}"
        )
    key = options.key_file or options.cert_file
    _tell("certificate", join_checks.certificate(options.cert_file, key, str(folder / CA), address))
    texts = dict.fromkeys((options.cert_file, key))
    return "".join(Path(one).read_text() for one in texts)


def _use(
    place: Place,
    conf: cfg.ConfigOpts,
    client: HostJoinsClient,
    text: str,
    certificate: str,
) -> None:
    """Use the token, and write what came; the configuration last, without which no agent starts."""
    key = NewKey()
    got = _joined(client, key.request(place.token.host))
    token, owner = place.token, place.owner
    user = broker_names.user_of(token.host)
    url = url_as(conf, user, got.password, token.transport_url)
    own = OwnKeys(token.host, got.generation, got.keys, url)
    if got.certificate:
        certificate = key.file(got.certificate)
    keys = _key_file(conf)
    _folder(Path(conf.state_dir), owner)
    place.path.parent.mkdir(parents=True, exist_ok=True, mode=0o711)
    replace(keys, own.text(), 0o600, (owner.uid, owner.gid))
    OwnKeys.read(keys, token.host)
    if token.ca:
        replace(place.beside(CA), token.ca, 0o644)
    if certificate:
        replace(_certificate_file(conf), certificate, 0o600, (owner.uid, owner.gid))
    replace(place.path, text, 0o640, (os.geteuid(), owner.gid))
    _tell("identity", f"host {token.host}, in {keys}")


def _joined(client: HostJoinsClient, request: str) -> Identity:
    for left in reversed(range(TRIES)):
        try:
            return client.join(request)
        except errors.Unavailable:
            if not left:
                raise
            time.sleep(PAUSE_SECONDS)
        except NotGenuine as problem:
            raise errors.ConfigError(
                "what came as the identity was not sealed for this machine: somebody else asks in its name"
            ) from problem
    raise AssertionError("the last try is answered, or raises")


def _folder(path: Path, owner: Owner) -> None:
    """As the unit's StateDirectory would make it."""
    if not path.exists():
        path.mkdir(parents=True, mode=0o750)
        if not owner.is_us:
            os.chown(path, owner.uid, owner.gid)


def start_agent(client: HostJoinsClient) -> None:
    """Start the unit, and wait until conductors hear it."""
    for words in (("enable", join_checks.UNIT), ("restart", join_checks.UNIT)):
        if complaint := join_checks.systemctl(*words):
            raise errors.ConfigError(
                f"systemctl {' '.join(words)}: {complaint}; see journalctl -u {join_checks.UNIT}, and then "
                "systemctl restart it: this host has its keys"
            )
    until = time.monotonic() + HEARD_SECONDS
    while time.monotonic() < until:
        try:
            if client.look().is_heard:
                _tell("agent", "runs, and the cloud hears it")
                return
        except errors.Unavailable:
            pass  # asked again
        time.sleep(PAUSE_SECONDS)
    raise errors.ConfigError(
        f"the agent runs, and the cloud has not heard it for {HEARD_SECONDS:.0f} s: see journalctl -u "
        f"{join_checks.UNIT}"
    )


def _tell(name: str, found: str) -> None:
    print(f"{name}: {found}", flush=True)
