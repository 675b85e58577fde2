# SPDX-License-Identifier: Apache-2.0
"""``kilonova join TOKEN``: makes this machine the host that ``kilonova host add`` named.

All checks run before the token is used. If the command is killed after that, the command has
written no files or some of them. Then ``kilonova host add`` prints another token, and the command
is repeated. The machine has no user of the cloud, so the controller creates the test server:
``kilonova host verify``.
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

TRIES, PAUSE_SECONDS = 3, 2.0  #: Attempts after a lost answer, and the pause between them.
#: Seconds until the started agent must have reported to a conductor.
HEARD_SECONDS = 60.0
#: Options of [tls] whose files do not exist yet.
_NOT_YET = ("ca_file", "cert_file", "key_file")
#: The file of the authority, beside agent.conf.
CA = "ca.pem"
#: The file of the certificate, in state_dir. The agent renews it there.
CERTIFICATE = "host.pem"


@dataclass(frozen=True)
class Place:
    """The configuration file of this host, the owner of files, and the token."""

    #: Path of agent.conf.
    path: Path
    owner: Owner
    token: JoinToken

    def options(self, address: str = "", certificate: str = "") -> dict[str, dict[str, str]]:
        """Return the options that agent.conf must have: section -> option -> value.

        The host's name comes from the token, and so do the TLS options if the cloud has TLS.

        Args:
            address: The host's address for live migrations, or "" to leave the option out.
            certificate: Path of the certificate, or "" to leave the option out.
        """
        options: dict[str, dict[str, str]] = {"DEFAULT": {"host": self.token.host}}
        if address:
            options["migration"] = {"live_migration_inbound_addr": address}
        tls = {}
        if self.token.ca:
            tls["ca_file"] = str(self.beside(CA))
        if certificate:
            tls["cert_file"] = certificate
        if self.token.allow_plain_text:
            tls["allow_plain_text"] = "true"
        return options | ({"tls": tls} if tls else {})

    def beside(self, name: str) -> Path:
        return self.path.parent / name


def join(options: argparse.Namespace) -> int:
    """Check the machine, use the token, write the files and start the agent.

    With ``--no-start`` the agent is not started.

    Raises:
        ConfigError: The token is malformed or not valid, a check failed, no conductor answers the
            check, another machine uses the same token, or the agent does not start. The text has
            the next step.
        Unavailable: The broker does not answer, or the conductors do not answer the exchange.
        NotFound, Conflict: A conductor refuses the token, because another token replaced it or
            another machine was first, or because it has expired.
    """
    try:
        text = sys.stdin.read() if options.token == "-" else options.token  # noqa: S105 - stands for standard input
        token = JoinToken.read(text)
    except ValueError as problem:
        raise errors.ConfigError(str(problem)) from problem
    path = Path(options.config or config.AGENT_FILE).absolute()
    place = Place(path, Owner.named(options.user), token)
    if not options.no_start:
        join_checks.unit()
    with tempfile.TemporaryDirectory() as folder, _connect(place, Path(folder)) as (conf, client):
        state = _check_token(conf, token, client)
        address = _check_machine(options, place, conf, state)
        certificate = _certificate(options, place, Path(folder), state, address)
        is_secured = certificate or state.signs
        own = str(_certificate_file(conf)) if is_secured else ""
        texts = merged(path, place.options(address, own))
        _use_token(place, conf, client, texts, certificate)
        if options.no_start:
            print(f"{path} was written. Start kilonova-agent with this configuration")
        else:
            start_agent(client)
    print(f"Then run on the controller: kilonova host verify {token.host}")
    return 0


@contextmanager
def _connect(place: Place, folder: Path) -> Iterator[tuple[cfg.ConfigOpts, HostJoinsClient]]:
    """Yield the agent's future configuration, as far as known, and a client of the conductors.

    The configuration is read from a copy in ``folder``, so agent.conf is not written yet. The
    client uses the token's key, and is closed at the end of the block.

    Raises:
        ConfigError: agent.conf exists, and is invalid or contradicts the token.
    """
    trial, authority = folder / config.AGENT_FILE.rpartition("/")[2], folder / CA
    trial.write_text(merged(place.path, place.options()))
    authority.write_text(place.token.ca)
    conf = config.load(str(trial), config.AGENT)
    for name in _NOT_YET:
        value = str(authority) if name == "ca_file" and place.token.ca else ""
        conf.set_override(name, value, group="tls")
    token = place.token
    connect = opener(conf, token.transport_url)
    link = HostSide(connect, token.keys, token.host, purpose=Purpose.JOIN)
    try:
        yield conf, HostJoinsClient(link)
    finally:
        link.close()
        for name in _NOT_YET:
            conf.clear_override(name, group="tls")


def _check_token(conf: cfg.ConfigOpts, token: JoinToken, client: HostJoinsClient) -> TokenState:
    """Read the token's state from a conductor, compare the clocks, and return the state.

    Raises:
        ConfigError: The broker refuses the token's user, no conductor answers, the clocks differ,
            or the token was used or has expired.
        NotFound: The token was replaced, or the host was removed.
        Unavailable: The broker or the conductor's database does not answer.
    """
    # The broker's refusal has a reason.
    look_in(conf, token.transport_url, "the token")
    try:
        state, difference = join_checks.clock(client.look)
    except errors.NoAnswer as problem:
        raise errors.ConfigError(
            "the broker answers, but no conductor does. Either no conductor runs (see kilonova status on the "
            f"controller), or the token was replaced, or host {token.host} was removed. For another token run "
            f"kilonova host add {token.host} on the controller"
        ) from problem
    if state.refusal:
        raise errors.ConfigError(state.refusal)
    _report("broker", address_of(conf, token.transport_url).hosts[0].hostname)
    _report("clock", difference)
    return state


def _check_machine(
    options: argparse.Namespace, place: Place, conf: cfg.ConfigOpts, state: TokenState
) -> str:
    """Check address, libvirt, KVM, disk space and present keys of this machine, and print results.

    Return the address at which other machines reach this machine.

    Raises:
        ConfigError: A check failed.
    """
    token = place.token
    address = join_checks.address(
        options.address,
        state.address,
        conf.migration.live_migration_inbound_addr,
        address_of(conf, token.transport_url),
    )
    _report("address", address)
    for name, check in (
        ("libvirt", join_checks.libvirt),
        ("guests", join_checks.acceleration),
        ("space", join_checks.space),
    ):
        _report(name, check(conf))
    _require_own_keys(_key_file(conf), token.host)
    return address


def _require_own_keys(path: Path, host: str) -> None:
    """Check that this machine is not another host, which may have guests.

    A machine without the file ``path`` is not a host yet.

    Raises:
        ConfigError: The file ``path`` has the keys of another host, or cannot be read.
    """
    try:
        other = json.loads(path.read_text())["host"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        other = "(it cannot be read)"
    if other != host:
        raise errors.ConfigError(
            f"this machine has the keys of host {other} in {path}. To make it host {host}, stop kilonova-agent, run "
            f"kilonova host remove {other} on the controller, and move the state_dir {path.parent} away"
        )


def _certificate_file(conf: cfg.ConfigOpts) -> Path:
    return Path(conf.state_dir) / CERTIFICATE


def _key_file(conf: cfg.ConfigOpts) -> Path:
    return Path(conf.agent.key_file or f"{conf.state_dir}/host.key")


def _certificate(
    options: argparse.Namespace, place: Place, folder: Path, state: TokenState, address: str
) -> str:
    """Check ``--cert-file`` and ``--key-file``, and return certificate and key (PEM).

    Without ``--key-file`` the key is in the file of ``--cert-file``. The result is "" if the cloud
    has no TLS, or if a conductor signs the host's certificate.

    Args:
        options: The command line.
        place: Has the token.
        folder: Has the certificate of the cloud's authority.
        state: The state of the token.
        address: The address that the certificate must name.

    Raises:
        ConfigError: ``--cert-file`` is missing, not needed, or not valid for this host.
    """
    if not place.token.ca or state.signs:
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
            f"this cloud has TLS, and no certificate comes with the token. Give --cert-file FILE with a certificate "
            f"for {address} that the cloud's authority has signed. Or set [tls] ca_key_file where conductors run, "
            f"and run kilonova host add {place.token.host} --address {address} again"
        )
    key = options.key_file or options.cert_file
    _report(
        "certificate", join_checks.certificate(options.cert_file, key, str(folder / CA), address)
    )
    texts = dict.fromkeys((options.cert_file, key))
    return "".join(Path(file).read_text() for file in texts)


def _use_token(
    place: Place,
    conf: cfg.ConfigOpts,
    client: HostJoinsClient,
    text: str,
    certificate: str,
) -> None:
    """Exchange the token for the host's identity, and write the files.

    The configuration file is written last, because no agent starts without it.

    Args:
        place: The host's configuration file, the owner of files, and the token.
        conf: The configuration that the agent will have.
        client: The client of conductors.
        text: The text of the configuration file.
        certificate: The operator's certificate with the key (PEM), or "". A certificate from the
            conductor replaces it.

    Raises:
        ConfigError: Another machine uses the same token.
        NotFound: The token was replaced, or the host was removed.
        Conflict: Another machine has used the token, or the token has expired.
        Unavailable: The conductors do not answer, or cannot answer now.
    """
    key = NewKey()
    identity = _request_identity(client, key.request(place.token.host))
    token, owner = place.token, place.owner
    user = broker_names.user_of(token.host)
    url = url_as(conf, user, identity.password, token.transport_url)
    own_keys = OwnKeys(token.host, identity.generation, identity.keys, url)
    if identity.certificate:
        certificate = key.file(identity.certificate)
    keys = _key_file(conf)
    _create_state_dir(Path(conf.state_dir), owner)
    place.path.parent.mkdir(parents=True, exist_ok=True, mode=0o711)
    replace(keys, own_keys.text(), 0o600, (owner.uid, owner.gid))
    OwnKeys.read(keys, token.host)
    if token.ca:
        replace(place.beside(CA), token.ca, 0o644)
    if certificate:
        replace(_certificate_file(conf), certificate, 0o600, (owner.uid, owner.gid))
    replace(place.path, text, 0o640, (os.geteuid(), owner.gid))
    _report("identity", f"host {token.host}, in {keys}")


def _request_identity(client: HostJoinsClient, request: str) -> Identity:
    for left in reversed(range(TRIES)):
        try:
            return client.join(request)
        except errors.Unavailable:
            if not left:
                raise
            time.sleep(PAUSE_SECONDS)
        except NotGenuine as problem:
            raise errors.ConfigError(
                "the conductor's answer was not sealed for this machine: another machine uses the same token. Run "
                "kilonova host add on the controller for another token"
            ) from problem
    raise AssertionError("the requests for the host's identity ended without result and error")


def _create_state_dir(path: Path, owner: Owner) -> None:
    """Create state_dir if missing, with the owner and mode of the unit's StateDirectory."""
    if not path.exists():
        path.mkdir(parents=True, mode=0o750)
        if not owner.is_us:
            os.chown(path, owner.uid, owner.gid)


def start_agent(client: HostJoinsClient) -> None:
    """Enable and restart the agent's unit, and wait for the agent's first report to a conductor.

    Raises:
        ConfigError: The unit does not start, or no conductor has heard the agent after
            ``HEARD_SECONDS``.
    """
    for words in (("enable", join_checks.UNIT), ("restart", join_checks.UNIT)):
        if complaint := join_checks.systemctl(*words):
            raise errors.ConfigError(
                f"systemctl {' '.join(words)}: {complaint}. See journalctl -u {join_checks.UNIT}. This host has its "
                f"keys already, so then only run: systemctl restart {join_checks.UNIT}"
            )
    until = time.monotonic() + HEARD_SECONDS
    while time.monotonic() < until:
        try:
            if client.look().is_heard:
                _report("agent", "runs, and a conductor has heard it")
                return
        except errors.Unavailable:
            pass  # The next attempt follows.
        time.sleep(PAUSE_SECONDS)
    raise errors.ConfigError(
        f"the agent was started, but no conductor has heard it for {HEARD_SECONDS:.0f} s: see journalctl -u "
        f"{join_checks.UNIT}"
    )


def _report(name: str, result: str) -> None:
    print(f"{name}: {result}", flush=True)
