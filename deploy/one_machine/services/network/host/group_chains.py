# SPDX-License-Identifier: Apache-2.0
"""The chains of security groups: packets that the groups permit return, and others are dropped.

filters.py decides which chain a flow enters, and when. A flow is matched by the addresses of the
first packet, which conntrack stores as the original direction. For a live-migrated guest the
beginning of a flow may be unknown. Then the original direction is that of the first packet here,
and the flow passes if either end may have begun it. The functions are pure.
"""

from collections.abc import Iterable, Mapping

from deploy.one_machine.services.network.host.description import (
    ICMP,
    ICMP6,
    TCP,
    SecurityGroup,
    SecurityRule,
)
from deploy.one_machine.services.network.host.names import digest
from deploy.one_machine.services.network.host.nft import set_of

DIRECTIONS = ("egress", "ingress")


def group_chain(
    direction: str, names: Iterable[str], groups: Mapping[str, SecurityGroup]
) -> tuple[str, ...]:
    """Return the statements of the chain for a port's groups.

    A statement for each rule returns the packets that the rule permits. The last statement drops
    all other packets.

    Args:
        direction: "egress" or "ingress", as seen from the port.
        names: The ids of the port's groups. Unknown groups permit no traffic.
        groups: All groups by id.
    """
    return tuple(dict.fromkeys([*map(_rule, _rules(direction, names, groups)), "drop"]))


def midstream_chain(
    direction: str, names: Iterable[str], groups: Mapping[str, SecurityGroup]
) -> tuple[str, ...]:
    """Return the statements of the chain for TCP connections whose beginning is unknown.

    Either end may have begun such a connection, so the rules of both directions count, if their
    protocol is TCP or any. The arguments are those of `group_chain`.
    """
    own_rules, other_rules = (
        [_rule(rule) for rule in _rules(side, names, groups) if rule.protocol in (None, TCP)]
        for side in (direction, *(side for side in DIRECTIONS if side != direction))
    )
    return tuple(
        dict.fromkeys(
            [*own_rules, *(rule.replace("ct original", "ct reply") for rule in other_rules), "drop"]
        )
    )


def _rules(
    direction: str, names: Iterable[str], groups: Mapping[str, SecurityGroup]
) -> list[SecurityRule]:
    return [
        rule
        for name in names
        if name in groups
        for rule in groups[name].rules
        if rule.ingress == (direction == "ingress")
    ]


def _rule(rule: SecurityRule) -> str:
    family, side = ("ip" if rule.version == 4 else "ip6"), ("saddr" if rule.ingress else "daddr")
    words = [f"meta nfproto ipv{rule.version}"]
    if rule.protocol is not None:
        words.append(f"ct original protocol {rule.protocol}")
    if rule.protocol in (ICMP, ICMP6):
        kind = "icmp" if rule.protocol == ICMP else "icmpv6"
        words += [
            f"{kind} {name} {value}"
            for name, value in (("type", rule.low), ("code", rule.high))
            if value is not None
        ]
    elif rule.low is not None or rule.high is not None:
        low = rule.low or 0
        high = 65535 if rule.high is None else rule.high
        words.append(
            f"ct original proto-dst {low}" if low == high else f"ct original proto-dst {low}-{high}"
        )
    if rule.prefix is not None and rule.prefix.prefixlen > 0:
        words.append(f"ct original {family} {side} {rule.prefix}")
    if rule.group is not None:
        words.append(f"ct original {family} {side} @{group_set(rule.group, rule.version)}")
    return " ".join([*words, "return"])


def group_set(name: str, version: int) -> str:
    """Return the name of the nft set with a group's members of one IP version.

    Args:
        name: The id of the group.
        version: 4 or 6.
    """
    return f"group{version}_{digest(name, 12)}"


def group_members(name: str, version: int, group: SecurityGroup | None) -> str:
    """Return the nft text of the set of a group's member addresses of one IP version.

    Args:
        name: The id of the group.
        version: 4 or 6.
        group: The group, or None for an empty set.
    """
    prefixes = [prefix for prefix in (group.members if group else ()) if prefix.version == version]
    if any(prefix.prefixlen != prefix.max_prefixlen for prefix in prefixes):
        return set_of(
            group_set(name, version),
            f"type ipv{version}_addr; flags interval; auto-merge",
            map(str, prefixes),
        )
    return set_of(
        group_set(name, version),
        f"type ipv{version}_addr",
        (str(one.network_address) for one in prefixes),
    )
