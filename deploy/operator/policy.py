# SPDX-License-Identifier: Apache-2.0
"""``kilonova policy list`` and ``kilonova policy explain RULE --as ROLE``.

Both read the configured policy files, and evaluate rules as the API and the placement service do.
They send no requests to the cloud: roles are taken by name.
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
#: Owners of the resource that a rule is evaluated for.
TARGETS = (
    ("what is theirs", _OWN),
    ("what is another user's of their project", {**_OWN, "user_id": "another"}),
    ("what is another project's", {"project_id": "another", "user_id": "another"}),
)


def policies(options: argparse.Namespace) -> dict[str, Policy]:
    """Return the policy of each rule, by the rule's name.

    A rule of both the API and the placement service gets the policy of the API.
    """
    conf = config.load(options.config)
    placement = policy.load_policy(conf, "placement", PLACEMENT_RULES)
    api = policy.load_policy(conf, "api", COMPUTE_RULES)
    return {
        **dict.fromkeys(api.in_force, api),
        **{name: placement for name in placement.in_force if name not in api.in_force},
    }


def listed(options: argparse.Namespace) -> int:
    """Print every policy rule with check and origin, and return 0."""
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
    """Print whether a caller with the roles of ``--as`` may use the rule, and on which resources.

    Returns:
        0 if the rule allows the caller's own resources, 1 if not, 2 if an argument is missing or
        the rule does not exist.
    """
    owners = policies(options)
    if not options.rule or not options.roles:
        print("kilonova: give RULE and --as ROLE", file=sys.stderr)
        return WRONG
    if options.rule not in owners:
        nearest = difflib.get_close_matches(options.rule, owners, 1) or [
            name for name in owners if options.rule in name
        ]
        print(
            f"kilonova: there is no policy rule {options.rule}{f'; did you mean {nearest[0]}?' if nearest else ''}",
            file=sys.stderr,
        )
        return WRONG
    owner = owners[options.rule]
    caller = RequestContext(
        user_id="they",
        project_id="theirs",
        roles=tuple(options.roles),
        request_id=ids.new_request(),
    )
    answers = {words: owner.allows(options.rule, caller, target) for words, target in TARGETS}
    if options.json:
        print(
            json.dumps(
                {
                    "rule": options.rule,
                    "roles": policy.add_implied(caller.roles),
                    "may": answers,
                    "guards": list(guarded(options.rule)),
                    "made_of": dict(parts(owner, options.rule)),
                },
                indent=1,
            )
        )
    else:
        print(text(owner, options.rule, caller, answers))
    return MAY if answers["what is theirs"] else MAY_NOT


def text(owner: Policy, rule: str, caller: RequestContext, answers: dict[str, bool]) -> str:
    """Return the explanation as text for people.

    Args:
        owner: The policy with the rule.
        rule: Name of the rule.
        caller: The caller with the roles of ``--as``.
        answers: Description of resources -> True if the caller may use the rule on them.
    """
    lines = [f"guards {operation}" for operation in guarded(rule)]
    lines += [
        f"{name}: {check or '@'}  ({owner.in_force[name].origin})"
        if name in owner.in_force
        else f"{name}: there is no such rule"
        for name, check in parts(owner, rule)
    ]
    roles = [
        *caller.roles,
        *(
            role
            for role in policy.add_implied(caller.roles)
            if role not in map(str.lower, caller.roles)
        ),
    ]
    lines.append(f"a caller with the roles {', '.join(roles)} may do it to")
    return "\n".join(
        [
            *lines,
            *(f"  {words}: {'yes' if allowed else 'no'}" for words, allowed in answers.items()),
        ]
    )


def parts(owner: Policy, rule: str) -> Iterator[tuple[str, str]]:
    """Yield name and check of the rule and of all rules that it refers to, each once.

    The check of a rule that does not exist is "".
    """
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
    """Yield the operations ("METHOD PATH") that check this rule before they start.

    Operations that check the rule later are not listed. Rules in ``BASES`` are only parts of other
    rules, so nothing is yielded for them.
    """
    if rule in BASES:
        return
    from compute_api.compute.routes import ROUTES
    from compute_api.placement.routes import ROUTES as PLACEMENT_ROUTES

    operations = [f"{route.method} {route.path}" for route in ROUTES if route.policy == rule]
    operations += [
        f"{route.method} {route.path}" for route in PLACEMENT_ROUTES if route.policy == rule
    ]
    operations += [
        f"POST /servers/{{server_id}}/action {row.key}"
        for row in states.ACTIONS
        if row.policy == rule and row.key
    ]
    yield from dict.fromkeys(operations)
