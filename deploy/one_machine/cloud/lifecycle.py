# SPDX-License-Identifier: Apache-2.0
"""The life of one cloud on this machine: prepare, launch, shut down, purge.

Used by deploy/one_machine/{up,down,lab}.py and by the tests. Every function but ``purge`` can be
repeated. ``shut_down`` removes from the kernel all that the cloud made there, and ``purge`` removes
the home.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence

from common.security import private_files
from compute_api.metadata.proxy_headers import host_key
from deploy.one_machine.cloud import certificates, configuration, power, processes, settings
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import MOST_HOSTS, PASSWORDS, Cloud
from deploy.one_machine.cloud.probes import answers, http_answers
from deploy.one_machine.cloud.process_control import explain_failure, find_process, find_supervisor
from deploy.one_machine.machine import supervise
from deploy.packages import ROOT
from deploy.progress import Failure, private, run, wait


def prepare(cloud: Cloud) -> None:
    """Make folders, secrets, certificates and configuration.

    Existing passwords stay. Certificates stay unless they expire soon or an address changed. The
    configuration, the keys of the network agents and the broker's users are written again, because
    they follow from the facts of the cloud. A running broker imports changed users.

    Raises:
        Failure: RabbitMQ is not installed, or a running broker refuses the users.
        TimeoutExpired: A running broker does not import the users in time.
    """
    for name in ("etc", "secrets", "data", "log", "run", "image"):
        (cloud.home / name).mkdir(parents=True, exist_ok=True)
        (cloud.home / name).chmod(0o700)
    # The guests' processes and the broker reach their own files through the home.
    cloud.home.chmod(0o711)
    for name in PASSWORDS:
        path = cloud.secret(name)
        if not path.exists():
            # A "-" in front would be read as an option.
            private_files.replace(path, secrets.token_hex(24))
    for _, host in processes.network_parts(cloud):
        private_files.replace(cloud.network_key(host), host_key(cloud.password("metadata"), host))
    certificates.make(cloud)
    virt_type = _find_virt_type(cloud)
    for number, host in enumerate(cloud.hosts, 1):
        cloud.state_folder(number).mkdir(mode=0o700, exist_ok=True)
        cloud.libvirt_folder(number).mkdir(mode=0o700, exist_ok=True)
        if cloud.shared:
            _share_instances(cloud, number)
        private_files.replace(
            cloud.config(host), configuration.of_host(cloud, host, number, virt_type)
        )
    for role in ("", *configuration.ROLES):
        private_files.replace(cloud.config(role=role), configuration.of_control_plane(cloud, role))
    private_files.replace(cloud.clouds_yaml, configuration.clouds(cloud))
    if cloud.broker_url is None:
        broker = Broker.of(cloud)
        if broker.prepare() and find_supervisor(cloud) is not None:
            broker.learn_users()


def _find_virt_type(cloud: Cloud) -> str:
    """Return "kvm" or "qemu", by one probe guest for all hosts, or "auto" without real guests.

    A machine whose KVM hangs needs seconds for a probe, and each host of a lab would run one at
    each boot.
    """
    if not cloud.has_guests:
        return "auto"
    from compute_agent.virt.libvirt.host.host import kvm_works

    return "kvm" if kvm_works(cloud.run) else "qemu"


def _share_instances(cloud: Cloud, number: int) -> None:
    (cloud.home / "instances").mkdir(mode=0o711, exist_ok=True)
    instances = cloud.state_folder(number) / "instances"
    if not instances.is_symlink():
        instances.symlink_to(cloud.home / "instances")


def launch(
    cloud: Cloud,
    programs: Sequence[supervise.Program] | None = None,
    broker_seconds: float = 90,
) -> None:
    """Start the supervisor with all processes, or bring a running supervisor up to date.

    A running supervisor restarts programs with changed commands or environments, and stops programs
    that are not in the list any more. Stopped processes and hosts without power start again. The
    broker and libvirt start first, because without them the other processes would fail and wait
    before they try again.

    Args:
        cloud: The cloud, which ``prepare`` has prepared.
        programs: The programs to run, or None for ``processes.programs``.
        broker_seconds: How long to wait for the broker after a start of the supervisor.

    Raises:
        Failure: The supervisor, the broker, or a new or changed program does not start in time,
            or the namespaces of the hosts cannot be made.
    """
    new_programs = processes.programs(cloud) if programs is None else list(programs)
    if cloud.is_joined:
        cloud.underlay.make(len(cloud.hosts))
    for marker in cloud.run.glob("*.down"):
        marker.unlink()
    if find_supervisor(cloud) is None:
        first = [
            program for program in new_programs if program.name.startswith(processes.FIRST_PROGRAMS)
        ]
        supervise.write(cloud.run, first)
        settings.remember(cloud)
        _start_supervisor(cloud)
        _await_broker(cloud, broker_seconds)
    running = supervise.read(cloud.run)
    if running == new_programs:
        return
    supervise.write(cloud.run, new_programs)
    supervisor = find_supervisor(cloud)
    if supervisor is None:
        raise Failure(
            f"The supervisor of the cloud in {cloud.home} has ended.",
            explain_failure(cloud, "supervise"),
        )
    old_pids = {
        program.name: find_process(cloud, program.name)
        for program in new_programs
        if program not in running
    }
    os.kill(supervisor, signal.SIGHUP)
    wait(
        lambda: all(find_process(cloud, name) not in (None, old) for name, old in old_pids.items()),
        120,
        f"Not all of these processes start: {', '.join(old_pids)}",
        lambda: explain_failure(cloud, "supervise"),
    )


def _start_supervisor(cloud: Cloud) -> None:
    with open(cloud.log("supervise"), "ab", opener=private) as log:
        subprocess.Popen(
            [
                *(sys.executable, "-m", "deploy.one_machine.machine.supervise"),
                *(str(cloud.run), "--preload"),
            ],
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=processes.make_environment(cloud),
        )
    wait(
        lambda: find_supervisor(cloud) is not None,
        10,
        "The supervisor does not start",
        lambda: explain_failure(cloud, "supervise"),
    )


def _await_broker(cloud: Cloud, seconds: float) -> None:
    if cloud.broker_url is None:
        wait(
            lambda: answers(cloud.ports.broker, cloud.address),
            seconds,
            "RabbitMQ does not answer",
            lambda: explain_failure(cloud, "rabbitmq"),
        )


def await_http(cloud: Cloud, name: str, url: str, seconds: float = 60) -> None:
    """Wait until the service answers at the URL without a server error.

    Args:
        cloud: The cloud.
        name: The name of the process, for the message and its log.
        url: The URL to request.
        seconds: The longest time to wait.

    Raises:
        Failure: The service does not answer within this many seconds.
    """
    files = certificates.of(cloud, certificates.CONTROL)
    wait(
        lambda: http_answers(url, files and files.ca),
        seconds,
        f"The {name} service does not answer at {url}",
        lambda: explain_failure(cloud, name),
    )


def shut_down(cloud: Cloud, seconds: float = 120) -> bool:
    """Stop all processes, and remove the namespaces, devices and rules that they made.

    This also cleans up after a cloud that was killed. The files stay.

    Returns:
        False if the cloud did not run. The kernel was cleaned up in this case too.

    Raises:
        Failure: Processes still run after this many seconds, or a command that cleans up fails.
    """
    supervisor = find_supervisor(cloud)
    if supervisor is not None:
        os.kill(supervisor, signal.SIGTERM)
        wait(
            lambda: find_supervisor(cloud) is None,
            seconds,
            f"The processes of the cloud in {cloud.home} do not stop",
            f"See {cloud.log('supervise')}; kill the supervisor, process {supervisor}, and run this again.",
        )
    if cloud.volume_folder.exists():
        # Exports outlive the volume service, as guests outlive their agent.
        run(
            processes.end_exports_command(cloud),
            "Run ./deploy/down again.",
            log=cloud.log("volume"),
        )
    for number in range(MOST_HOSTS + 1):
        if cloud.network_folder(number).exists():
            power.sweep(cloud, number)
    cloud.underlay.remove()
    return supervisor is not None


def purge(cloud: Cloud) -> None:
    """Remove the home with all data.

    Raises:
        Failure: The folder is not the home of a cloud, or the cloud runs.
    """
    if find_supervisor(cloud) is not None or not cloud.secret("broker").exists():
        raise Failure(
            f"{cloud.home} is not the home of a stopped cloud; nothing is removed.",
            "Check the value of KILONOVA_HOME. Stop a running cloud with ./deploy/down first.",
        )
    shutil.rmtree(cloud.home)
