# SPDX-License-Identifier: Apache-2.0
"""What a router translates: the text of the nft table inside its namespace.

A floating IP is the guest's own to the outside: one to one, in both directions. Everybody else goes
out with the router's address when it may (``snat``). From outside only what was translated comes
in. A guest that talks to a floating IP of its own router is translated too, or the answer would not
come back this way. Pure.
"""

from deploy.one_machine.services.network.host.description import Router

TABLE = "router"
#: A packet that came from inside and was sent to a floating IP.
TURNED = 1


def router_rules(router: Router) -> str:
    """The whole table, for one transaction."""
    before, after, passing = [], [], []
    if router.external is not None:
        outside = next((str(one.ip) for one in router.external.addresses if one.version == 4), None)
        pairs = sorted(router.floating)
        if pairs:
            inward = ", ".join(f"{floating} : {fixed}" for floating, fixed in pairs)
            own = {fixed: floating for floating, fixed in pairs}  # one, where a guest has two
            outward = ", ".join(f"{fixed} : {floating}" for fixed, floating in own.items())
            targets = ", ".join(str(floating) for floating, _ in pairs)
            before += [
                f'iifname != "out" ip daddr {{ {targets} }} meta mark set {TURNED}',
                f"dnat ip to ip daddr map {{ {inward} }}",
            ]
            after.append(f'oifname "out" snat ip to ip saddr map {{ {outward} }}')
            after.append(f"meta mark {TURNED} snat ip to ip saddr map {{ {outward} }}")
        if outside is not None:
            after.append(f"meta mark {TURNED} snat ip to {outside}")
            if router.snat:
                after.append(f'oifname "out" snat ip to {outside}')
        passing = [
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
            *before,
            "  }",
            "  chain postrouting {",
            "    type nat hook postrouting priority 100; policy accept;",
            *after,
            "  }",
            "  chain forward {",
            "    type filter hook forward priority 0; policy accept;",
            "ip daddr 169.254.0.0/16 drop",
            *passing,
            "  }",
            "}",
            "",
        ]
    )
