# SPDX-License-Identifier: Apache-2.0
"""What is had on the machine itself: by another local user, by who reads a stolen host's files, by
a guest."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from common.service import config
from deploy.one_machine.connectivity import QUICK, SSH
from tests.attacks.target import DEMO, Outcome, Target
from tests.other_users import PYTHON_OF_ALL_USERS

GATEWAY = "10.20.0.1"  # of the network that ./deploy/up makes
NOBODY, READ_AT_MOST = 65534, 1 << 20
#: What may be a key, a token or a password.
SECRET = re.compile(r"[A-Za-z0-9+/_=-]{24,512}")
MOST_TRIED = 40
#: Files that hold nothing of anybody's: certificates, names of guests' ports for dnsmasq.
PUBLIC = re.compile(r"/(ca|[a-z0-9-]+)\.pem$|\.pub$")
#: Opens each file of a list, and tells which it could read or write.
OPENS = """
import json, os, sys
for path in json.load(sys.stdin):
    for how, flag in (("reads", os.O_RDONLY), ("writes", os.O_WRONLY)):
        try:
            os.close(os.open(path, flag | os.O_NONBLOCK | os.O_NOFOLLOW))
        except OSError:
            continue
        print(how, path)
    if os.path.isdir(path):
        try:
            os.listdir(path)
        except OSError:
            continue
        print("lists", path)
"""
#: Calls addresses and ports of a host from a guest, with what its busybox has.
CALLS = (
    "for a in {addresses}; do for p in {ports}; do "
    "nc -w 1 $a $p < /dev/null > /dev/null 2>&1 && echo reached $a $p & done; wait; done; echo tried"
)


def local_users(target: Target) -> Iterator[Outcome]:
    """Another user of the machine, who knows every path."""
    for folder in target.folders:
        paths = [str(folder), *(str(path) for path in folder.rglob("*"))]
        done = subprocess.run(
            [PYTHON_OF_ALL_USERS, "-I", "-c", OPENS],
            input=json.dumps(paths),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
        )
        had = [line for line in done.stdout.splitlines() if not PUBLIC.search(line)]
        yield Outcome(
            f"files: what another user has of {len(paths)} below {folder}", "; ".join(had[:10])
        )


def secrets_of(target: Target) -> dict[str, str]:
    """The control plane's and its users', by what they are."""
    conf = target.conf
    found = {
        f"[{group}] {name}": str(conf[group][name])
        for group, options in config.OPTIONS.items()
        for name in (option.dest for option in options)
        if group != "DEFAULT" and re.search(r"password|secret", name) and conf[group][name]
    }
    found["secret_key"] = conf.secret_key
    found |= {f"password of {cloud}": target.credentials(cloud)["password"] for cloud in (DEMO,)}
    for host in target.hosts[1:]:
        found |= {f"key {name} of {host.name}": key for name, key in host.keys.secrets.items()}
    return {name: value for name, value in found.items() if value}


def loot(target: Target) -> str:
    """The text of all that root finds of the stolen host's agent."""
    stolen, proof = target.stolen, target.stolen.proof
    files = [
        stolen.file,
        *(path for path in stolen.state.rglob("*") if path.is_file() and not path.is_symlink()),
        *(Path(name) for name in ((proof.cert, proof.key) if proof is not None else ()) if name),
    ]
    return "\n".join(
        path.read_bytes().decode(errors="replace")
        for path in files
        if path.exists() and path.stat().st_size < READ_AT_MOST
    )


def stolen_files(target: Target) -> Iterator[Outcome]:
    """The files of a host hold no secret of the cloud, and nothing that a service takes for one."""
    text = loot(target)
    assert all(key in text for key in target.stolen.keys.secrets.values()), "the wrong files"
    held = [name for name, secret in secrets_of(target).items() if secret in text]
    yield Outcome("files: a host's hold secrets of the cloud", ", ".join(held))
    tried = list(dict.fromkeys(SECRET.findall(text)))[:MOST_TRIED]
    doors = {
        "identity": f"{target.identity_url}/users",
        "image": f"{target.url('image')}/v2/images",
        "compute": f"{target.url('compute')}/servers",
        "network": f"{target.url('network')}/v2.0/ports",
    }
    for service, url in doors.items():
        if not url.startswith("http"):
            continue
        taken = [
            one[:8]
            for one in tried
            if target.session.get(url, headers={"X-Auth-Token": one}, timeout=30).status_code != 401
        ]
        yield Outcome(
            f"{service}: {len(tried)} words of a host's files as tokens", ", ".join(taken)
        )
    yield from _gateway(target, tried)


def _gateway(target: Target, tried: list[str]) -> Iterator[Outcome]:
    door = target.doors["image-gateway"]
    taken = []
    for word in ("", *tried):
        said = f"GET /images/{'0' * 8}-0000-0000-0000-{'0' * 12} HTTP/1.1\r\nHost: x\r\n"
        said += f"Authorization: Bearer {word}\r\nX-Auth-Token: {word}\r\nConnection: close\r\n\r\n"
        status = door.ask(said.encode())[0].split(b"\r\n")[0].split(b" ")[1:2]
        taken += [word[:8]] * (status not in ([b"401"], [b"403"], [b"404"]))
    yield Outcome(f"image-gateway: {len(tried)} words as tickets", ", ".join(taken))


def listeners(target: Target) -> Iterator[Outcome]:
    """A guest calls every port that listens on this machine, at every address of it."""
    attack = "guest: listeners of the host"
    servers = target.call("GET", "/servers/detail?name=^first$").json()["servers"]
    floating = [
        one["addr"]
        for server in servers
        for addresses in server["addresses"].values()
        for one in addresses
        if one["OS-EXT-IPS:type"] == "floating"
    ]
    if target.login is None or not floating:
        yield Outcome(attack, untried="there is no guest with a floating address and a key")
        return
    listening = _told("ss", "-ltnH")
    ports = sorted({line.split()[3].rsplit(":", 1)[1] for line in listening})
    own = _addresses() | {GATEWAY}
    command = CALLS.format(addresses=" ".join(sorted(own)), ports=" ".join(ports))
    done = subprocess.run(
        ["ssh", "-i", str(target.login), *SSH, *QUICK, f"root@{floating[0]}", command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "tried" not in done.stdout:
        yield Outcome(attack, untried=f"the guest does not answer: {done.stderr[-200:]}")
        return
    still = _addresses() | {GATEWAY}  # another cloud may come and go beside this one
    reached = [
        line
        for line in done.stdout.splitlines()
        if line.startswith("reached") and line.split()[1] in still
    ]
    yield Outcome(f"{attack}: {len(ports)} ports at {len(own)} addresses", "; ".join(reached[:10]))


def _addresses() -> set[str]:
    """Of this machine, but for the loopback's."""
    found = re.findall(r"(\d+\.\d+\.\d+\.\d+)/", "\n".join(_told("ip", "-4", "-br", "address")))
    return {one for one in found if not one.startswith("127.")}


def _told(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def guests_are_confined(target: Target) -> Iterator[Outcome]:
    """No guest's process is root's."""
    attack = "guest: a process of root"
    with target.server(target.stolen.name):
        users = dict(_guests(str(target.stolen.state).encode()))
    if not users:
        yield Outcome(attack, untried="no guest is a process here")
        return
    roots = [pid for pid, user in users.items() if user == 0]
    yield Outcome(f"{attack}, of {len(users)}", ", ".join(roots))


def _guests(folder: bytes) -> Iterator[tuple[str, int]]:
    """Processes of QEMU with files below this folder, and their users."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"qemu-system" in line.split(b"\0")[0] and folder in line:
                yield process.name, os.stat(process).st_uid
