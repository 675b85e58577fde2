# SPDX-License-Identifier: Apache-2.0
"""What security groups make of a flow: chains of nft in which what is allowed returns and the rest is dropped.

Used by filters.py, which decides who judges a flow and when. A flow is judged on the addresses that it began with,
which conntrack keeps as its original direction. Where its beginning was not seen (its guest came here running), the
original direction is only who was heard first: then it is good when either end may have begun it. Pure.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from deploy.standalone.network.host.description import ICMP, ICMP6, TCP, Group, Rule
from deploy.standalone.network.host.names import digest
from deploy.standalone.network.host.nft import Set

DIRECTIONS = ("egress", "ingress")


def judge(direction: str, names: Iterable[str], groups: Mapping[str, Group]) -> tuple[str, ...]:
    """What the groups together allow returns, the rest is dropped."""
    return tuple(dict.fromkeys([*map(_rule, _rules(direction, names, groups)), "drop"]))


def judge_middle(direction: str, names: Iterable[str], groups: Mapping[str, Group]) -> tuple[str, ...]:
    """The same for a connection whose beginning nobody saw: either end may have begun it."""
    this, other = ([_rule(rule) for rule in _rules(way, names, groups) if rule.protocol in (None, TCP)]
                   for way in (direction, *(way for way in DIRECTIONS if way != direction)))
    return tuple(dict.fromkeys([*this, *(rule.replace("ct original", "ct reply") for rule in other), "drop"]))


def _rules(direction: str, names: Iterable[str], groups: Mapping[str, Group]) -> list[Rule]:
    return [rule for name in names if name in groups for rule in groups[name].rules
            if rule.ingress == (direction == "ingress")]


def _rule(rule: Rule) -> str:
    family, side = ("ip" if rule.version == 4 else "ip6"), ("saddr" if rule.ingress else "daddr")
    words = [f"meta nfproto ipv{rule.version}"]
    if rule.protocol is not None:
        words.append(f"ct original protocol {rule.protocol}")
    if rule.protocol in (ICMP, ICMP6):
        kind = "icmp" if rule.protocol == ICMP else "icmpv6"
        words += [f"{kind} {name} {value}" for name, value in (("type", rule.low), ("code", rule.high))
                  if value is not None]
    elif rule.low is not None or rule.high is not None:
        low = rule.low or 0
        high = 65535 if rule.high is None else rule.high
        words.append(f"ct original proto-dst {low}" if low == high else f"ct original proto-dst {low}-{high}")
    if rule.prefix is not None and rule.prefix.prefixlen > 0:
        words.append(f"ct original {family} {side} {rule.prefix}")
    if rule.group is not None:
        words.append(f"ct original {family} {side} @{group_set(rule.group, rule.version)}")
    return " ".join([*words, "return"])


def group_set(name: str, version: int) -> str:
    """What the set of a group's members is called."""
    return f"group{version}_{digest(name, 12)}"


def group_members(version: int, group: Group | None) -> Set:
    """The addresses of a group's ports, of one version of IP."""
    found = [prefix for prefix in (group.members if group else ()) if prefix.version == version]
    wide = any(prefix.prefixlen != prefix.max_prefixlen for prefix in found)
    kind = f"ipv{version}_addr; flags interval; auto-merge" if wide else f"ipv{version}_addr"
    return Set("set", f"type {kind}", {str(prefix if wide else prefix.network_address): "" for prefix in found})
