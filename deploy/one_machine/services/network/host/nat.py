# SPDX-License-Identifier: Apache-2.0
"""The translation of a router's addresses: the nft table in the namespace.

A floating IP is translated one to one in both directions. Other guests use the router's address if
``snat`` is set. From outside only translated packets get in. A guest's packet to a floating IP of
the same router is translated too, so that the answer returns through the router. The functions are
pure.
"""

from deploy.one_machine.services.network.host.description import Router

TABLE = "router"
#: The mark of a packet from inside to a floating IP.
TURNED = 1


def router_rules(router: Router) -> str:
    """Return the nft document that replaces the table ``TABLE`` in a router's namespace."""
    prerouting, postrouting, forward = [], [], []
    if router.external is not None:
        router_address = next(
            (str(address.ip) for address in router.external.addresses if address.version == 4), None
        )
        pairs = sorted(router.floating)
        if pairs:
            inward = ", ".join(f"{floating} : {fixed}" for floating, fixed in pairs)
            # A guest with two floating IPs uses only the last for outgoing packets.
            floating_by_fixed = {fixed: floating for floating, fixed in pairs}
            outward = ", ".join(
                f"{fixed} : {floating}" for fixed, floating in floating_by_fixed.items()
            )
            targets = ", ".join(str(floating) for floating, _ in pairs)
            prerouting += [
                f'iifname != "out" ip daddr {{ {targets} }} meta mark set {TURNED}',
                f"dnat ip to ip daddr map {{ {inward} }}",
            ]
            postrouting.append(f'oifname "out" snat ip to ip saddr map {{ {outward} }}')
            postrouting.append(f"meta mark {TURNED} snat ip to ip saddr map {{ {outward} }}")
        if router_address is not None:
            postrouting.append(f"meta mark {TURNED} snat ip to {router_address}")
            if router.snat:
                postrouting.append(f'oifname "out" snat ip to {router_address}')
        forward = [
            'iifname "out" ct status dnat accept',
            'iifname "out" ct direction reply accept',
            'iifname "out" meta nfproto ipv4 drop',
        ]
    return "\n".join(
        [
            f"add table inet {TABLE}",
            f"delete table inet {TABLE}",
            f"table inet {TABLE} {{",
            "  chain prerouting {",
            "    type nat hook prerouting priority -100; policy accept;",
            *prerouting,
            "  }",
            "  chain postrouting {",
            "    type nat hook postrouting priority 100; policy accept;",
            *postrouting,
            "  }",
            "  chain forward {",
            "    type filter hook forward priority 0; policy accept;",
            "ip daddr 169.254.0.0/16 drop",
            *forward,
            "  }",
            "}",
            "",
        ]
    )
