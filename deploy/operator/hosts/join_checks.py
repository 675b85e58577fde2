# SPDX-License-Identifier: Apache-2.0
"""The checks of ``kilonova join`` before the token is used.

Each check returns the result as text, or raises ConfigError with the next step.
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from oslo_config import cfg

from common.domain import errors
from common.domain.errors import ConfigError
from common.rpc.broker import BrokerAddress
from common.rpc.host_credentials import TokenState
from common.security import tls
from deploy.operator import config_check

UNIT = "kilonova-agent"
#: Seconds by which clocks may differ, because cookies, tickets and certificates depend on the time.
CLOCK_SECONDS = 10.0
LEAST_GIB = 2
COMMAND_SECONDS = 90.0


def clock(look: Callable[[], TokenState]) -> tuple[TokenState, str]:
    """Return the token's state, and the difference between this clock and the cloud's as text.

    Args:
        look: Requests the token's state from a conductor.

    Raises:
        ConfigError: The clocks differ by more than ``CLOCK_SECONDS`` plus the request's duration.
        Problem: From ``look``, for example NoAnswer if no conductor answers.
    """
    before = time.time()
    state = look()
    after = time.time()
    ahead = (before + after) / 2 - state.now / 1e6
    if abs(ahead) > CLOCK_SECONDS + (after - before):
        way = "ahead of" if ahead > 0 else "behind"
        raise ConfigError(
            f"this clock is {abs(ahead):.0f} s {way} the cloud's: synchronize both with NTP (timedatectl "
            "set-ntp true, or chrony), and check the result with timedatectl"
        )
    return state, f"{abs(ahead):.1f} s from the cloud's"


def address(
    explicit: str | None, invited: str, configured: str | None, broker: BrokerAddress
) -> str:
    """Return the address at which other machines reach this host.

    The first of these sources counts: ``explicit``, ``invited``, ``configured``, and the local
    address of a connection to the broker. The last one may not be a loopback address.

    Args:
        explicit: ``--address`` of this command, or None.
        invited: The address given to ``kilonova host add``, or "".
        configured: ``live_migration_inbound_addr`` in the configuration file.
        broker: The broker's address.

    Raises:
        ConfigError: The address is not an address of this machine, ``explicit`` differs from
            ``invited``, or the last source has no address or a loopback address.
    """
    specified = explicit or invited or configured or ""
    chosen = specified or _address_towards(broker)
    if not specified and tls.is_loopback(chosen):
        raise ConfigError(
            f"this host reaches the broker by {chosen}, at which other machines cannot reach this host. Give an "
            "address for them: --address IP"
        )
    if explicit and invited and explicit != invited:
        raise ConfigError(
            f"--address is {explicit}, but kilonova host add got {invited}, which is the address in the certificate. "
            f"Leave --address out, or run kilonova host add again with --address {explicit}"
        )
    require_own_address(chosen)
    return chosen


def require_own_address(address: str) -> None:
    """Check that a text is an IP address of this machine.

    Raises:
        ConfigError: The text is no IP address, or this machine does not have the address.
    """
    try:
        parsed = ipaddress.ip_address(address)
        with socket.socket(socket.AF_INET6 if parsed.version == 6 else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (ValueError, OSError) as problem:
        raise ConfigError(
            f"{address} is not an address of this machine ({problem}); the command ip address shows its addresses"
        ) from problem


def _address_towards(broker: BrokerAddress) -> str:
    for host in broker.hosts:
        try:
            candidates = socket.getaddrinfo(
                host.hostname, host.port or 5672, type=socket.SOCK_DGRAM
            )
        except OSError:
            continue  # Another name of the broker may resolve.
        for family, kind, _, _, target in candidates:
            with socket.socket(family, kind) as probe:
                try:
                    # A datagram socket sends nothing here.
                    probe.connect(target)
                except OSError:
                    continue  # Another address may be reachable.
                return str(probe.getsockname()[0])
    raise ConfigError(
        "this machine has no route to the broker: check its routes, or give --address IP"
    )


def libvirt(conf: cfg.ConfigOpts) -> str:
    """Return libvirt's URI and version as text, or a notice if the host uses another driver.

    Raises:
        ConfigError: libvirt does not answer or refuses the call, or its Python package is missing.
    """
    try:
        return config_check.libvirt(conf)
    except errors.Problem as problem:
        raise ConfigError(
            f"{problem} Install libvirt-daemon-system and qemu-system-x86, and start libvirtd"
        ) from problem


def acceleration(conf: cfg.ConfigOpts) -> str:
    """Return as text whether guests will run with KVM or by emulation.

    For a driver other than libvirt, the text says that no guests run.

    Raises:
        ConfigError: ``[agent] virt_type`` is kvm, and KVM does not work.
    """
    if conf.agent.driver != "libvirt":
        return f"no guests run, because [agent] driver is {conf.agent.driver}"
    if conf.agent.virt_type == "qemu":
        return "emulation, because [agent] virt_type is qemu"
    from compute_agent.virt.libvirt.host.host import kvm_works

    with tempfile.TemporaryDirectory() as folder:
        works = kvm_works(Path(folder))
    if works:
        return "KVM works"
    mend = (
        "enable virtualization in the firmware (nested virtualization on a virtual machine), and load a module so "
        "that /dev/kvm exists: modprobe kvm_intel or kvm_amd"
    )
    if conf.agent.virt_type == "kvm":
        raise ConfigError(f"KVM does not work, and [agent] virt_type is kvm: {mend}")
    return f"emulation, ten times slower: KVM does not work; {mend}"


def space(conf: cfg.ConfigOpts) -> str:
    """Check that state_dir has ``LEAST_GIB`` for guests' disks, and return the free space as text.

    ``[agent] reserved_disk_gb`` does not count as free.

    Raises:
        ConfigError: There is less space.
    """
    folder = Path(conf.state_dir)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30 - conf.agent.reserved_disk_gb
    if free < LEAST_GIB:
        raise ConfigError(
            f"{conf.state_dir} has {max(0, free):.1f} GiB left for guests: free some space, mount a larger disk there, "
            "or set state_dir"
        )
    return f"{free:.0f} GiB for guests in {conf.state_dir}"


def certificate(cert: str, key: str, ca: str, address: str) -> str:
    """Check that the operator's certificate names ``address`` and has a known issuer.

    The issuer is ``ca``, or an intermediate authority of ``ca`` in the file ``cert``. Return a text
    with file, address and end of the certificate.

    Args:
        cert: Path of the certificate.
        key: Path of its key.
        ca: Path of the certificate of the cloud's authority.
        address: The address of this host.

    Raises:
        ConfigError: The certificate or the key cannot be used.
    """
    tls.load(cert, key, ca, "--cert-file {}, --key-file {}, the token's authority {}")
    chain = x509.load_pem_x509_certificates(Path(cert).read_bytes())
    own = chain[0]
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        reached = [str(authority) for authority in names.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        reached = []
    if str(ipaddress.ip_address(address)) not in reached:
        raise ConfigError(
            f"the certificate {cert} names {', '.join(reached) or 'no address'}, and not {address}: create one with "
            f"subjectAltName=IP:{address}, or give another --address"
        )
    if not _leads_to(own, x509.load_pem_x509_certificates(Path(ca).read_bytes()), chain[1:]):
        raise ConfigError(
            f"the certificate {cert} was not signed by the authority of this cloud ([tls] ca_file of the controller)"
        )
    return f"{cert}, for {address}, until {own.not_valid_after_utc:%Y-%m-%d}"


def _leads_to(
    cert: x509.Certificate,
    authorities: Sequence[x509.Certificate],
    intermediates: Sequence[x509.Certificate],
) -> bool:
    """Return True if an authority signed the certificate, directly or through intermediates."""
    if any(_is_signed_by(cert, authority) for authority in authorities):
        return True
    return any(
        _leads_to(issuer, authorities, [one for one in intermediates if one is not issuer])
        for issuer in intermediates
        if _is_signed_by(cert, issuer)
    )


def _is_signed_by(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def unit() -> None:
    """Check that systemd runs and knows the agent's unit.

    Raises:
        ConfigError: Systemd does not run, or does not know the unit.
    """
    if not Path("/run/systemd/system").is_dir():
        raise ConfigError(
            "systemd does not run here: give --no-start, and start kilonova-agent yourself"
        )
    if systemctl("cat", f"{UNIT}.service"):
        raise ConfigError(
            f"systemd knows no {UNIT}.service: install the agent's package or its unit (deploy/systemd), or give "
            "--no-start"
        )


def systemctl(*words: str) -> str:
    """Run systemctl and return the error, or an empty text on success."""
    try:
        process = subprocess.run(
            ["systemctl", "--no-pager", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    return (
        ""
        if process.returncode == 0
        else (process.stderr.strip() or f"status {process.returncode}")
    )
