# SPDX-License-Identifier: Apache-2.0
"""Attacks on the machine: by another local user, with a stolen host's files, and from a guest."""

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

#: Gateway of the network that ./deploy/up creates.
GATEWAY = "10.20.0.1"
NOBODY, MAX_BYTES = 65534, 1 << 20
#: Words that may be a key, a token or a password.
SECRET = re.compile(r"[A-Za-z0-9+/_=-]{24,512}")
MOST_WORDS = 40
#: Files without secrets: certificates and public keys.
PUBLIC = re.compile(r"/(ca|[a-z0-9-]+)\.pem$|\.pub$")
#: A program that prints the files of a list which it can read, write or list.
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
#: A program for the busybox of a guest. It connects to addresses and ports of the host.
CALLS = (
    "for a in {addresses}; do for p in {ports}; do "
    "nc -w 1 $a $p < /dev/null > /dev/null 2>&1 && echo reached $a $p & done; wait; done; echo tried"
)


def local_users(target: Target) -> Iterator[Outcome]:
    """Open every file of the cloud by its path as another user of the machine."""
    for folder in target.folders:
        paths = [str(folder), *(str(path) for path in folder.rglob("*"))]
        process = subprocess.run(
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
        lines = [line for line in process.stdout.splitlines() if not PUBLIC.search(line)]
        yield Outcome(
            f"files: access of another user to {len(paths)} below {folder}", "; ".join(lines[:10])
        )


def list_secrets(target: Target) -> dict[str, str]:
    """Return the secrets of the control plane, of its users and of the other hosts, by title."""
    conf = target.conf
    secrets = {
        f"[{group}] {name}": str(conf[group][name])
        for group, options in config.OPTIONS.items()
        for name in (option.dest for option in options)
        if group != "DEFAULT" and re.search(r"password|secret", name) and conf[group][name]
    }
    secrets["secret_key"] = conf.secret_key
    secrets |= {f"password of {cloud}": target.credentials(cloud)["password"] for cloud in (DEMO,)}
    for host in target.hosts[1:]:
        secrets |= {f"key {name} of {host.name}": key for name, key in host.keys.secrets.items()}
    return {name: value for name, value in secrets.items() if value}


def read_agent_files(target: Target) -> str:
    """Return the text of all files of the stolen host's agent that are smaller than 1 MiB."""
    stolen, tls_files = target.stolen, target.stolen.tls_files
    files = [
        stolen.file,
        *(path for path in stolen.state.rglob("*") if path.is_file() and not path.is_symlink()),
        *(
            Path(name)
            for name in ((tls_files.cert, tls_files.key) if tls_files is not None else ())
            if name
        ),
    ]
    return "\n".join(
        path.read_bytes().decode(errors="replace")
        for path in files
        if path.exists() and path.stat().st_size < MAX_BYTES
    )


def stolen_files(target: Target) -> Iterator[Outcome]:
    """Search a host's files for secrets of the cloud, and use their words as tokens and tickets."""
    text = read_agent_files(target)
    assert all(key in text for key in target.stolen.keys.secrets.values()), "the wrong files"
    names = [name for name, secret in list_secrets(target).items() if secret in text]
    yield Outcome("files: secrets of the cloud in a host's files", ", ".join(names))
    words = list(dict.fromkeys(SECRET.findall(text)))[:MOST_WORDS]
    urls = {
        "identity": f"{target.identity_url}/users",
        "image": f"{target.url('image')}/v2/images",
        "compute": f"{target.url('compute')}/servers",
        "network": f"{target.url('network')}/v2.0/ports",
    }
    for service, url in urls.items():
        if not url.startswith("http"):
            continue
        accepted = [
            word[:8]
            for word in words
            if target.session.get(url, headers={"X-Auth-Token": word}, timeout=30).status_code
            != 401
        ]
        yield Outcome(
            f"{service}: {len(words)} words of a host's files as tokens", ", ".join(accepted)
        )
    yield from _try_tickets(target, words)


def _try_tickets(target: Target, words: list[str]) -> Iterator[Outcome]:
    """Use words as tickets of the image gateway."""
    endpoint = target.endpoints["image-gateway"]
    accepted = []
    for word in ("", *words):
        request = f"GET /images/{'0' * 8}-0000-0000-0000-{'0' * 12} HTTP/1.1\r\nHost: x\r\n"
        request += f"Authorization: Bearer {word}\r\nX-Auth-Token: {word}\r\n"
        request += "Connection: close\r\n\r\n"
        status = endpoint.send(request.encode())[0].split(b"\r\n")[0].split(b" ")[1:2]
        accepted += [word[:8]] * (status not in ([b"401"], [b"403"], [b"404"]))
    yield Outcome(f"image-gateway: {len(words)} words as tickets", ", ".join(accepted))


def listeners(target: Target) -> Iterator[Outcome]:
    """Connect from a guest to every listening port and address of this machine."""
    attack = "guest: listeners of the host"
    servers = target.call("GET", "/servers/detail?name=^first$").json()["servers"]
    floating = [
        address["addr"]
        for server in servers
        for addresses in server["addresses"].values()
        for address in addresses
        if address["OS-EXT-IPS:type"] == "floating"
    ]
    if target.login is None or not floating:
        yield Outcome(attack, untried="there is no guest with a floating address and a key")
        return
    sockets = _run_lines("ss", "-ltnH")
    ports = sorted({line.split()[3].rsplit(":", 1)[1] for line in sockets})
    own = _list_addresses() | {GATEWAY}
    command = CALLS.format(addresses=" ".join(sorted(own)), ports=" ".join(ports))
    process = subprocess.run(
        ["ssh", "-i", str(target.login), *SSH, *QUICK, f"root@{floating[0]}", command],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "tried" not in process.stdout:
        yield Outcome(attack, untried=f"the guest does not answer: {process.stderr[-200:]}")
        return
    # Ignore addresses of another cloud on this machine that ended meanwhile.
    remaining = _list_addresses() | {GATEWAY}
    reached = [
        line
        for line in process.stdout.splitlines()
        if line.startswith("reached") and line.split()[1] in remaining
    ]
    yield Outcome(f"{attack}: {len(ports)} ports at {len(own)} addresses", "; ".join(reached[:10]))


def _list_addresses() -> set[str]:
    """Return the IPv4 addresses of this machine without the loopback addresses."""
    output = "\n".join(_run_lines("ip", "-4", "-br", "address"))
    addresses = re.findall(r"(\d+\.\d+\.\d+\.\d+)/", output)
    return {address for address in addresses if not address.startswith("127.")}


def _run_lines(*command: str) -> list[str]:
    """Run a command and return the lines of its output."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def guest_users(target: Target) -> Iterator[Outcome]:
    """Check that no guest's process runs as root."""
    attack = "guest: a process of root"
    with target.create_server(target.stolen.name):
        users = dict(_list_guests(str(target.stolen.state).encode()))
    if not users:
        yield Outcome(attack, untried="no guest is a process on this machine")
        return
    roots = [pid for pid, user in users.items() if user == 0]
    yield Outcome(f"{attack}, of {len(users)}", ", ".join(roots))


def _list_guests(folder: bytes) -> Iterator[tuple[str, int]]:
    """Yield the process id and the user id of each QEMU with files below this folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"qemu-system" in line.split(b"\0")[0] and folder in line:
                yield process.name, os.stat(process).st_uid
