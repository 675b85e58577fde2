# SPDX-License-Identifier: Apache-2.0
"""``kilonova policy list`` and ``kilonova policy explain RULE --as ROLE``: who may do what, and who
says so.

Both read the policy files that the configuration names, and ask them as the API and the placement
service do. Nothing is asked of the cloud: roles are taken by their names.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from typing import Any

from common.domain import ids, states
from common.domain.context import RequestContext
from common.service import config
from compute_api.compute.policies import COMPUTE_RULES
from compute_api.http import policy, policy_file
from compute_api.http.policy import Policy
from compute_api.http.policy_rules import BASES
from compute_api.placement.policies import PLACEMENT_RULES
from deploy.operator.output import columns

MAY, MAY_NOT, WRONG = range(3)
_OWN = {"project_id": "theirs", "user_id": "they"}
#: Whose things a rule may be about.
TARGETS = (
    ("what is theirs", _OWN),
    ("what is another user's of their project", {**_OWN, "user_id": "another"}),
    ("what is another project's", {"project_id": "another", "user_id": "another"}),
)


def policies(options: argparse.Namespace) -> dict[str, Policy]:
    """Each rule, and the policy that it belongs to; those that both have are the API's."""
    conf = config.load(options.config)
    placement = policy.configured(conf, "placement", PLACEMENT_RULES)
    api = policy.configured(conf, "api", COMPUTE_RULES)
    return {
        **dict.fromkeys(api.in_force, api),
        **{name: placement for name in placement.in_force if name not in api.in_force},
    }


def listed(options: argparse.Namespace) -> int:
    """Print every rule."""
    rules = {name: owner.in_force[name] for name, owner in policies(options).items()}
    if options.json:
        print(
            json.dumps(
                [
                    {"rule": name, "who": rule.check, "from": rule.origin}
                    for name, rule in rules.items()
                ],
                indent=1,
            )
        )
    else:
        print(
            columns(
                [
                    ["rule", "who", "from"],
                    *([name, rule.check or "@", rule.origin] for name, rule in rules.items()),
                ]
            )
        )
    return 0


def explain(options: argparse.Namespace) -> int:
    """Print whether a caller with these roles may; 0: at least to what is theirs, 1: not, 2: what
    was asked is wrong."""
    known = policies(options)
    if not options.rule or not options.roles:
        print("kilonova: say which RULE, and --as which ROLE", file=sys.stderr)
        return WRONG
    if options.rule not in known:
        nearest = difflib.get_close_matches(options.rule, known, 1) or [
            name for name in known if options.rule in name
        ]
        print(
            f"kilonova: there is no rule {options.rule}{f'; did you mean {nearest[0]}?' if nearest else ''}",
            file=sys.stderr,
        )
        return WRONG
    owner = known[options.rule]
    who = RequestContext(
        user_id="they",
        project_id="theirs",
        roles=tuple(options.roles),
        request_id=ids.new_request(),
    )
    may = {words: owner.allows(options.rule, who, target) for words, target in TARGETS}
    if options.json:
        print(
            json.dumps(
                {
                    "rule": options.rule,
                    "roles": policy.implied(who.roles),
                    "may": may,
                    "guards": list(guarded(options.rule)),
                    "made_of": dict(parts(owner, options.rule)),
                },
                indent=1,
            )
        )
    else:
        print(text(owner, options.rule, who, may))
    return MAY if may["what is theirs"] else MAY_NOT


def text(owner: Policy, rule: str, who: RequestContext, may: dict[str, bool]) -> str:
    """For people."""
    lines = [f"guards {operation}" for operation in guarded(rule)]
    lines += [
        f"{name}: {check or '@'}  ({owner.in_force[name].origin})"
        if name in owner.in_force
        else f"{name}: there is no such rule"
        for name, check in parts(owner, rule)
    ]
    roles = [
        *who.roles,
        *(role for role in policy.implied(who.roles) if role not in map(str.lower, who.roles)),
    ]
    lines.append(f"a caller who is {', '.join(roles)} may do it to")
    return "\n".join(
        [*lines, *(f"  {words}: {'yes' if yes else 'no'}" for words, yes in may.items())]
    )


def parts(owner: Policy, rule: str) -> Iterator[tuple[str, str]]:
    """The rule and those that it is made of, each once."""
    todo, seen = [rule], set[str]()
    while todo:
        name = todo.pop(0)
        if name in seen:
            continue
        seen.add(name)
        check: Any = owner.in_force[name].check if name in owner.in_force else ""
        yield name, check
        todo += policy_file.references(check)


def guarded(rule: str) -> Iterator[str]:
    """The operations that ask for the rule before anything else; what asks for it within one is not
    known here."""
    if rule in BASES:
        return
    from compute_api.compute.routes import ROUTES
    from compute_api.placement.routes import ROUTES as PLACEMENT_ROUTES

    found = [f"{route.method} {route.path}" for route in ROUTES if route.policy == rule]
    found += [f"{route.method} {route.path}" for route in PLACEMENT_ROUTES if route.policy == rule]
    found += [
        f"POST /servers/{{server_id}}/action {row.key}"
        for row in states.ACTIONS
        if row.policy == rule and row.key
    ]
    yield from dict.fromkeys(found)
