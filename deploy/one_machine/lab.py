# SPDX-License-Identifier: Apache-2.0
"""``./deploy/lab``: a lab of several hosts on this machine, for experiments and failure tests.

A lab is a cloud as ``./deploy/up`` makes it, in a separate home (KILONOVA_HOME, or by default
beside that of ./deploy/up). ``down`` removes the lab with all data.
deploy/one_machine/lab_hosts.py has the commands on hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from deploy.one_machine import lab_hosts, up
from deploy.one_machine.lab_hosts import Lab
from deploy.progress import Failure, main, say

USAGE = f"""usage: ./deploy/lab COMMAND
  up N [--shared] [--volumes]
                    create a lab of N hosts, or start all hosts of the present lab again; --shared: the guests'
                    disks are in one folder; --volumes: with a volume service
  down              remove the lab with all data
  status            show hosts, their addresses and guests
  kill HOST         power cut: agent, libvirtd and guests die at once
  start HOST        boot a host that was killed or fenced
  cut HOST          disconnect the host's network cable; the guests continue to run
  heal HOST         connect the cable again
  fence HOST        kill a host and check that none of its processes remains: the lab's fencing hook
The lab is in the folder KILONOVA_HOME, by default {lab_hosts.HOME}. The ports begin at KILONOVA_PORT_BASE, by
default {lab_hosts.PORT_BASE}."""

#: Command on a host -> the function, and the message after success.
HOST_COMMANDS: dict[str, tuple[Callable[[Lab, str], None], str]] = {
    "kill": (Lab.kill, "has no power; boot it with: ./deploy/lab start {0}"),
    "start": (Lab.start, "boots; its agent registers in a few seconds"),
    "cut": (Lab.cut, "is cut off; its guests run on; heal it with: ./deploy/lab heal {0}"),
    "heal": (Lab.heal, "has its network again"),
    "fence": (Lab.fence, "is dead, and so are its guests"),
}


def command(arguments: list[str]) -> int:
    """Run the command of ``USAGE`` with these arguments, and return the exit status.

    Raises:
        Failure: The command is unknown or fails.
        TimeoutExpired: virsh did not end within 20 s for ``status``.
    """
    match arguments:
        case ["up", hosts, *options] if set(options) <= {"--shared", "--volumes", up.CONTINUED}:
            return _up(hosts, set(options))
        case ["down"]:
            return _down()
        case ["status"]:
            return _status(Lab.open(lab_hosts.home()))
        case [name, host] if name in HOST_COMMANDS:
            run, text = HOST_COMMANDS[name]
            run(Lab.open(lab_hosts.home()), host)
            say(f"{host} {text.format(host)}")
            return 0
        case ["--help" | "-h" | "help"]:
            say(USAGE)
            return 0
    raise Failure(f"Unknown command: {' '.join(arguments) or 'none given'}", USAGE)


def _up(hosts: str, options: set[str]) -> int:
    facts = lab_hosts.facts(hosts, "--shared" in options, "--volumes" in options)
    _require_root()
    lab = Lab.make(lab_hosts.home(), facts)
    if up.CONTINUED not in options:
        return up.run_first_steps(lab.cloud, "lab", "up", *lab_hosts.arguments(facts).split())
    lab.write_hook()
    say(f"""{up.run_later_steps(lab.cloud)}
This lab is {lab_hosts.describe(facts)}: {", ".join(lab.cloud.hosts)}. Commands to cause and observe failures:
  ./deploy/lab status
  ./deploy/lab kill {lab.cloud.hosts[0]}     # and start; cut and heal; fence
  ./deploy/lab down""")
    return 0


def _down() -> int:
    home = lab_hosts.home()
    if not home.exists():
        say(f"there is no lab in {home}; nothing is removed")
        return 0
    lab = Lab.open(home)
    _require_root()
    say(f"Removing the lab in {home} …")
    lab.down()
    say("removed")
    return 0


def _status(lab: Lab) -> int:
    _require_root()
    lab.require_running()
    say(f"{lab_hosts.describe(lab.facts)}; the services' address is {lab.cloud.address}")
    for number, host in enumerate(lab.cloud.hosts, 1):
        state = lab.state(host)
        say(f"{host:<6} {state:<4} {lab.cloud.host_address(number)}")
        guests = lab.guests(host) if state != "off" else []
        for line in (
            [f"{guest.server} {guest.state}" for guest in guests]
            if guests is not None
            else [f"libvirtd of {host} does not answer; see {lab.cloud.libvirt_folder(number)}/log"]
        ):
            say(f"         {line}")
    return 0


def _require_root() -> None:
    if os.geteuid() != 0:
        raise Failure(
            "./deploy/lab needs root for the processes and namespaces of a lab.",
            "Run this as root.",
        )


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
