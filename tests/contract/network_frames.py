# SPDX-License-Identifier: Apache-2.0
"""Guest programs of the network tests: forged frames, and both ends of a TCP connection.

Run inside a guest's namespace:

* ``forge KIND OWN_MAC VICTIM_MAC`` and ``flood COUNT KIND OWN_MAC`` send forged frames.
* ``announce OWN_MAC`` sends the announcements of QEMU after a live migration.
* ``listen PORT FILE`` and ``talk PORT ADDRESS`` are server and client. The client sends.
* ``push PORT`` and ``pull PORT ADDRESS FILE`` are the same with the server sending.
* ``sneak PORT ADDRESS OWN_ADDRESS`` sends a segment of a connection that was never opened, and then
  opens the connection.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

ALL = b"\xff" * 6
STRANGE = bytes.fromhex("6e6e6e6e6e6e")
OWN, OTHER, VICTIM = "10.0.0.5", "10.0.0.99", "10.0.0.6"


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip(source: str, target: str, protocol: int, payload: bytes) -> bytes:
    head = struct.pack(
        "!BBHHHBBH4s4s",
        0x45,
        0,
        20 + len(payload),
        1,
        0,
        64,
        protocol,
        0,
        socket.inet_aton(source),
        socket.inet_aton(target),
    )
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def ip6(source: str, target: str, kind: bytes) -> bytes:
    addresses = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(
        socket.AF_INET6, target
    )
    total = checksum(addresses + struct.pack("!II", len(kind), 58) + kind)
    head = struct.pack("!IHBB", 0x60000000, len(kind), 58, 255)
    return head + addresses + kind[:2] + struct.pack("!H", total) + kind[4:]


def link_local(own: bytes) -> str:
    """Return the IPv6 link-local address that a guest derives from the MAC address."""
    return (
        "fe80::"
        + f"{own[0] ^ 2:02x}{own[1]:02x}:{own[2]:02x}ff:fe{own[3]:02x}:{own[4]:02x}{own[5]:02x}"
    )


def address_probe(address: str) -> bytes:
    """Build a duplicate address detection: a neighbor solicitation from the unspecified address."""
    target = socket.inet_pton(socket.AF_INET6, address)
    return ip6("::", "ff02::1", b"\x87\0\0\0\0\0\0\0" + target)


def multicast_report(source: str) -> bytes:
    """Build an MLDv2 report of one group, with the hop-by-hop option that RFC 3810 requires."""
    group = socket.inet_pton(socket.AF_INET6, "ff02::1234")
    plain = ip6(source, "ff02::16", b"\x8f\0\0\0\0\0\0\1\4\0\0\0" + group)
    option = b"\x3a\0\5\2\0\0\1\0"
    return (
        plain[:4]
        + struct.pack("!HBB", len(plain) - 40 + len(option), 0, 1)
        + plain[8:40]
        + option
        + plain[40:]
    )


def udp(source: int, target: int) -> bytes:
    return struct.pack("!HHHH", source, target, 8 + 240, 0) + b"\2\1\6" + b"\0" * 237


def arp(sender: bytes, address: str) -> bytes:
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2)
    return head + sender + socket.inet_aton(address) + ALL + socket.inet_aton(VICTIM)


def frame(kind: str, own: bytes, victim: bytes) -> bytes:
    """Build the forged frame of this kind."""
    ping = b"\x08\0\xf7\xff\0\0\0\0"
    advert = socket.inet_pton(socket.AF_INET6, "2001:db8::99")
    return {
        "mac": victim + STRANGE + b"\x08\0" + ip(OWN, VICTIM, 1, ping),
        "ip": victim + own + b"\x08\0" + ip(OTHER, VICTIM, 1, ping),
        "arp": ALL + own + b"\x08\x06" + arp(own, OTHER),
        "arp-mac": ALL + own + b"\x08\x06" + arp(STRANGE, OWN),
        "rarp": announcement(STRANGE),
        "dhcp": ALL + own + b"\x08\0" + ip(OWN, "255.255.255.255", 17, udp(67, 68)),
        "rarp-sender": ALL + own + announcement(STRANGE)[12:32] + own + announcement(own)[38:],
        "rarp-target": ALL + own + announcement(own)[12:32] + STRANGE + announcement(own)[38:],
        "rarp-address": ALL
        + own
        + announcement(own)[12:28]
        + socket.inet_aton(OTHER)
        + announcement(own)[32:],
        "dad": b"\x33\x33\0\0\0\1" + own + b"\x86\xdd" + address_probe("2001:db8::99"),
        "dad-own": b"\x33\x33\0\0\0\1" + own + b"\x86\xdd" + address_probe(link_local(own)),
        "mld": b"\x33\x33\0\0\0\x16" + own + b"\x86\xdd" + multicast_report(link_local(own)),
        "mld-early": b"\x33\x33\0\0\0\x16" + own + b"\x86\xdd" + multicast_report("::"),
        "ra": b"\x33\x33\0\0\0\1"
        + own
        + b"\x86\xdd"
        + ip6(link_local(own), "ff02::1", b"\x86\0\0\0\x40\0\7\x08" + b"\0" * 8),
        "advert": b"\x33\x33\0\0\0\1"
        + own
        + b"\x86\xdd"
        + ip6(link_local(own), "ff02::1", b"\x88\0\0\0\x20\0\0\0" + advert + b"\2\1" + own),
        "ip6": victim
        + own
        + b"\x86\xdd"
        + ip6("2001:db8::99", "2001:db8::6", b"\x80\0\0\0\0\0\0\0"),
        "vlan": victim + own + b"\x81\0\0\5\x08\0" + ip(OTHER, VICTIM, 1, ping),
    }[kind]


def announcement(own: bytes) -> bytes:
    """Build the RARP frame that QEMU sends when a guest continues on another host."""
    return (
        ALL
        + own
        + b"\x80\x35"
        + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 3)
        + (own + b"\0" * 4) * 2
        + b"\0" * 18
    )


def segment(ports: bytes, source: str, target: str) -> bytes:
    """Build a TCP segment with only the flag ACK."""
    head = ports + struct.pack("!IIBBHHH", 1000, 1000, 0x50, 0x10, 1000, 0, 0)
    addresses = (
        socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!HH", 6, len(head))
    )
    return head[:16] + struct.pack("!H", checksum(addresses + head)) + head[18:]


def sneak(port: int, target: str, source: str) -> None:
    """Succeed if a connection can be opened inside a forged one."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP) as raw:
        raw.sendto(segment(struct.pack("!HH", 4321, port), source, target), (target, 0))
    with socket.socket() as connection:
        connection.settimeout(1)
        connection.bind(("", 4321))
        connection.connect((target, port))


def send_frame(data: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind(("eth0", 0))
        raw.send(data)


def flood(count: int, data: bytes) -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
        raw.bind(("eth0", 0))
        for _ in range(count):
            raw.send(data)


def announce(own: bytes) -> None:
    """Announce as often as QEMU, because a bridge does not forward right after a link came up."""
    send_frame(announcement(own))
    print("announced", flush=True)
    for pause in (0.05, 0.15, 0.25, 0.35):
        time.sleep(pause)  # the pauses between QEMU's announcements
        send_frame(announcement(own))


def store_received(connection: socket.socket, path: str) -> None:
    with connection, open(path, "ab", buffering=0) as file:
        while data := connection.recv(100):
            file.write(data)


def send_lines(connection: socket.socket) -> None:
    with connection:
        while True:
            connection.send(b"word\n")
            time.sleep(0.05)  # twenty lines a second


def main(words: list[str]) -> None:
    match words:
        case ["forge", kind, own, victim]:
            send_frame(
                frame(kind, *(bytes.fromhex(text.replace(":", "")) for text in (own, victim)))
            )
        case ["flood", count, kind, own]:
            octets = bytes.fromhex(own.replace(":", ""))
            flood(int(count), frame(kind, octets, octets))
        case ["announce", own]:
            announce(bytes.fromhex(own.replace(":", "")))
        case ["sneak", port, target, source]:
            sneak(int(port), target, source)
        case ["listen", port, path]:
            with socket.create_server(("", int(port))) as server:
                store_received(server.accept()[0], path)
        case ["talk", port, address]:
            send_lines(socket.create_connection((address, int(port))))
        case ["push", port]:
            with socket.create_server(("", int(port))) as server:
                send_lines(server.accept()[0])
        case ["pull", port, address, path]:
            store_received(socket.create_connection((address, int(port))), path)


if __name__ == "__main__":
    main(sys.argv[1:])
