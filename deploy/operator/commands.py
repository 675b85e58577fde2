# SPDX-License-Identifier: Apache-2.0
"""The table of the commands of ``kilonova``: their functions and arguments.

Parser, man pages and completions are generated from this table: deploy/operator/main.py,
deploy/packaging/manual.py, deploy/packaging/completion.py.
"""

from __future__ import annotations

import argparse
import ipaddress
from typing import Any

from common.security.broker_names import ROLES

#: Words of the command -> (module, function, help text).
COMMANDS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("database", "upgrade"): (
        "deploy.operator.database",
        "upgrade",
        "bring the database to this version; repeatable",
    ),
    ("database", "version"): (
        "deploy.operator.database",
        "version",
        "show the database's version and the one needed",
    ),
    ("database", "purge"): (
        "deploy.operator.database",
        "purge",
        "remove old rows: of deleted servers, of what has ended, of what is expired",
    ),
    ("doctor",): (
        "deploy.operator.doctor.command",
        "doctor",
        "check the invariants of the whole cloud; changes nothing but what --fix names",
    ),
    ("timeline",): (
        "deploy.operator.timeline",
        "timeline",
        "show who did what to a server, where and how long it took",
    ),
    ("status",): (
        "deploy.operator.status",
        "status",
        "show services, what is in hand, what is stuck",
    ),
    ("hosts",): (
        "deploy.operator.hosts.list",
        "hosts",
        "list all hosts: zone, state, what is free, which are left out",
    ),
    ("host", "add"): (
        "deploy.operator.hosts.identity",
        "add",
        "let a host join: print a token for kilonova join, good once and for an hour",
    ),
    ("host", "rotate"): (
        "deploy.operator.hosts.identity",
        "rotate",
        "give a host new ones; the old ones end",
    ),
    ("host", "remove"): (
        "deploy.operator.hosts.identity",
        "remove",
        "forget an empty host, and hear it no more",
    ),
    ("host", "drain"): (
        "deploy.operator.hosts.actions",
        "drain",
        "disable a host and move its servers away",
    ),
    ("host", "restore"): (
        "deploy.operator.hosts.restore",
        "restore",
        "use a host again: take back a drain, or forced_down",
    ),
    ("host", "evacuate"): (
        "deploy.operator.hosts.actions",
        "evacuate",
        "make the servers of a dead host again elsewhere",
    ),
    ("host", "debts"): (
        "deploy.operator.hosts.debts",
        "debts",
        "show what is left on hosts that have not removed it yet",
    ),
    ("host", "adopt"): (
        "deploy.operator.hosts.adopt",
        "adopt",
        "make a server of a guest that has no record",
    ),
    ("host", "discard"): (
        "deploy.operator.hosts.discard",
        "discard",
        "have a host remove a guest that has no record",
    ),
    ("broker", "add"): (
        "deploy.operator.hosts.broker_roles",
        "add",
        "give a role of the control plane its user at the broker",
    ),
    ("broker", "remove"): (
        "deploy.operator.hosts.broker_roles",
        "remove",
        "take a role's user away",
    ),
    ("action", "list"): (
        "deploy.operator.actions",
        "listed",
        "show what is in hand of servers, or only what is stuck",
    ),
    ("action", "show"): (
        "deploy.operator.actions",
        "show",
        "show how far an action is and why it does not go on",
    ),
    ("action", "retry"): (
        "deploy.operator.actions",
        "retry",
        "let a stuck action go on where it stands",
    ),
    ("action", "abort"): (
        "deploy.operator.actions",
        "abort",
        "let a stuck action be undone, and fail",
    ),
    ("action", "settle"): (
        "deploy.operator.actions",
        "settle",
        "end a stuck action as failed; its server goes to ERROR",
    ),
    ("explain",): (
        "deploy.operator.explain",
        "explain",
        "say why a server found no host, or whether one would",
    ),
    ("cleanup", "list"): (
        "deploy.operator.cleanups",
        "show",
        "show what neighbours have still to remove, and why",
    ),
    ("cleanup", "retry"): (
        "deploy.operator.cleanups",
        "retry",
        "have one of these tried again within seconds",
    ),
    ("cleanup", "drop"): (
        "deploy.operator.cleanups",
        "drop",
        "give one of these up: what it names stays",
    ),
    ("consoles", "list"): ("deploy.operator.consoles", "show", "show who has a console open"),
    ("consoles", "end"): (
        "deploy.operator.consoles",
        "end",
        "end the consoles of a server, or all",
    ),
    ("policy", "list"): (
        "deploy.operator.policy",
        "listed",
        "show every rule: who may, and who says so",
    ),
    ("policy", "explain"): ("deploy.operator.policy", "explain", "say whether a role may, and why"),
    ("host", "prove"): (
        "deploy.operator.hosts.prove",
        "prove",
        "make a server on a host, reach it, and remove it again",
    ),
    ("join",): (
        "deploy.operator.hosts.join",
        "join",
        "let this machine be a host, by a token of host add",
    ),
    ("config", "sample"): (
        "deploy.operator.config",
        "sample",
        "print a configuration file with every option",
    ),
    ("config", "check"): (
        "deploy.operator.config_check",
        "check",
        "read the configuration, ask each neighbour, and say what does not work",
    ),
    ("config", "show"): (
        "deploy.operator.config_show",
        "show",
        "show every value and where it comes from; secrets are hidden",
    ),
}

#: First words of several commands -> help text.
NOUNS = {
    "database": "the database: upgrade, version, purge",
    "cleanup": "what neighbours have still to remove: list, retry, drop",
    "consoles": "consoles that are open: list, end",
    "host": "one host: add, prove, rotate, remove, drain, restore, evacuate, debts, adopt, discard (all: hosts)",
    "broker": "who API, console service, scheduler and conductor are at the broker: add, remove",
    "action": "actions that are in hand, and ways out for stuck ones: list, show, retry, abort, settle",
    "policy": "who may do what: list, explain",
    "config": "the configuration file: sample, check, show",
}


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no IP address") from problem


def _kind_of_rows(text: str) -> str:
    from deploy.operator.store.purge import KINDS

    if text not in (names := [kind.name for kind in KINDS]):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
    return text


_JSON: tuple[str, dict[str, Any]] = (
    "--json",
    {"action": "store_true", "help": "as one JSON document"},
)
_AGENT: tuple[str, dict[str, Any]] = (
    "--agent",
    {"action": "store_true", "help": "the file is that of a host, as one named agent.conf is"},
)
_ID: tuple[str, dict[str, Any]] = (
    "id",
    {"type": _positive, "metavar": "ID", "help": "as the list shows it"},
)
_HOST: tuple[str, dict[str, Any]] = ("host", {"metavar": "HOST"})
_GUEST: tuple[str, dict[str, Any]] = (
    "server",
    {"metavar": "SERVER", "help": "its id, as kilonova doctor shows it"},
)
_FILE: tuple[str, dict[str, Any]] = (
    "--file",
    {"metavar": "FILE", "help": "the key file to write; default: HOST.key"},
)
_ROLE: tuple[str, dict[str, Any]] = (
    "role",
    {"choices": ROLES, "metavar": "ROLE", "help": ", ".join(ROLES)},
)
_ROLE_FILE: tuple[str, dict[str, Any]] = (
    "--file",
    {"metavar": "FILE", "help": "default: ROLE-broker.conf"},
)
_IDS: tuple[str, dict[str, Any]] = ("id", {"metavar": "ID", "nargs": "+"})
_DRY: tuple[str, dict[str, Any]] = (
    "--dry-run",
    {"action": "store_true", "help": "only say what would go where"},
)
_STOP: tuple[str, dict[str, Any]] = (
    "--stop",
    {
        "action": "store_true",
        "help": "begin nothing more; it ends when what is under way has ended",
    },
)
_PARALLEL: tuple[str, dict[str, Any]] = (
    "--parallel",
    {
        "type": _positive,
        "default": 2,
        "metavar": "N",
        "help": "so many servers at a time; default: 2",
    },
)
#: Options that exclude each other.
ONE_OF: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--live",
        {
            "action": "store_false",
            "dest": "cold",
            "default": False,
            "help": "running servers move while they run; the default",
        },
    ),
    (
        "--cold",
        {
            "action": "store_true",
            "dest": "cold",
            "default": False,
            "help": "running servers are stopped, moved and started",
        },
    ),
)
#: Words of the command -> its arguments, as for ``add_argument``.
ARGUMENTS: dict[tuple[str, ...], tuple[tuple[str, dict[str, Any]], ...]] = {
    ("config", "check"): (
        _AGENT,
        ("--no-neighbours", {"action": "store_true", "help": "only read the file"}),
    ),
    ("config", "show"): (
        _AGENT,
        ("--set", {"action": "store_true", "help": "only what is not its default"}),
        _JSON,
    ),
    ("doctor",): (
        _JSON,
        ("--no-hosts", {"action": "store_true", "help": "do not ask the hosts what they run"}),
        (
            "--fix",
            {
                "action": "append",
                "default": [],
                "metavar": "ID",
                "help": "mend this finding, as --json and the remedies name it; may be given several times",
            },
        ),
    ),
    ("database", "purge"): (
        (
            "--older-than",
            {
                "type": _positive,
                "metavar": "DAYS",
                "help": "what was over so many days ago; default: by kind",
            },
        ),
        (
            "--kind",
            {
                "action": "append",
                "default": [],
                "type": _kind_of_rows,
                "metavar": "KIND",
                "help": "servers (deleted ones), migrations, actions, host-actions, console-tokens, "
                "idempotency-keys; may be given several times. Without: all but migrations and actions",
            },
        ),
        ("--dry-run", {"action": "store_true", "help": "only say how many rows would go"}),
    ),
    ("hosts",): (_JSON,),
    ("timeline",): (
        ("about", {"metavar": "SERVER|REQUEST", "help": "id or name, or a request's id: req-…"}),
        _JSON,
    ),
    ("host", "add"): (
        _HOST,
        (
            "--address",
            {
                "type": _address,
                "metavar": "IP",
                "help": "the host's own, for its certificate where [tls] ca_key_file is set",
            },
        ),
        (
            "--broker",
            {
                "action": "append",
                "default": [],
                "metavar": "HOST[:PORT]",
                "help": "where hosts reach the broker; default: as in transport_url; may be given several times",
            },
        ),
        ("--file", {"metavar": "FILE", "help": "no token: write the host's keys to this file"}),
    ),
    ("host", "remove"): (_HOST,),
    ("host", "prove"): (
        _HOST,
        ("--image", {"metavar": "ID", "help": "default: the smallest one"}),
        ("--flavor", {"metavar": "ID", "help": "default: the smallest one that fits the image"}),
        (
            "--network",
            {
                "metavar": "ID",
                "help": "give it a port there, and see that ssh answers; this machine must reach it",
            },
        ),
        (
            "--timeout",
            {
                "type": _positive,
                "default": 300,
                "metavar": "SECONDS",
                "help": "for each step; default: 300",
            },
        ),
    ),
    ("join",): (
        ("token", {"metavar": "TOKEN", "help": "as kilonova host add printed it; -: read it here"}),
        (
            "--address",
            {
                "type": _address,
                "metavar": "IP",
                "help": "where others reach this host; default: as host add was told, else towards the broker",
            },
        ),
        (
            "--cert-file",
            {"metavar": "FILE", "help": "its certificate (PEM), where none comes with the token"},
        ),
        ("--key-file", {"metavar": "FILE", "help": "its key; default: in the same file"}),
        (
            "--user",
            {
                "default": "kilonova-agent",
                "metavar": "NAME",
                "help": "as whom the agent runs; default: kilonova-agent",
            },
        ),
        ("--no-start", {"action": "store_true", "help": "write the files, and start nothing"}),
    ),
    ("host", "rotate"): (
        _HOST,
        _FILE,
        (
            "--now",
            {
                "action": "store_true",
                "help": "the old ones end at once, and so do the host's connections",
            },
        ),
    ),
    ("host", "drain"): (
        _HOST,
        *ONE_OF,
        _DRY,
        _STOP,
        _PARALLEL,
        (
            "--wait",
            {"action": "store_true", "help": "go on until also those have gone that cannot go now"},
        ),
    ),
    ("host", "restore"): (_HOST,),
    ("host", "evacuate"): (
        _HOST,
        _DRY,
        _STOP,
        _PARALLEL,
        ("--yes", {"action": "store_true", "help": "although many hosts are gone at once"}),
    ),
    ("broker", "add"): (_ROLE, _ROLE_FILE),
    ("broker", "remove"): (_ROLE,),
    ("host", "debts"): (
        ("host", {"nargs": "?", "metavar": "HOST", "help": "of this host; default: of all"}),
        _JSON,
    ),
    ("host", "adopt"): (
        _HOST,
        _GUEST,
        ("--yes", {"action": "store_true", "help": "write what is shown without it"}),
        (
            "--force",
            {"action": "store_true", "help": "although project or host have no room for it"},
        ),
        (
            "--replace",
            {
                "action": "store_true",
                "help": "although the host of its record has a guest too: that one goes, with its disk",
            },
        ),
        (
            "--name",
            {"metavar": "NAME", "help": "in place of what the host remembers; so are these"},
        ),
        ("--project", {"metavar": "ID"}),
        ("--user", {"metavar": "ID"}),
        ("--flavor", {"metavar": "FLAVOR", "help": "id or name"}),
        ("--image", {"metavar": "IMAGE", "help": "id or name"}),
    ),
    ("host", "discard"): (
        _HOST,
        _GUEST,
        ("--yes", {"action": "store_true", "help": "remove it, and its disk"}),
    ),
    ("action", "list"): (
        ("--stuck", {"action": "store_true", "help": "only those that need an operator"}),
        _JSON,
    ),
    ("action", "show"): (("id", {"metavar": "ID"}), _JSON),
    **{("action", way): (_IDS,) for way in ("retry", "abort", "settle")},
    ("cleanup", "list"): (_JSON,),
    ("cleanup", "retry"): (_ID,),
    ("cleanup", "drop"): (_ID,),
    ("explain",): (
        (
            "server",
            {
                "nargs": "?",
                "metavar": "SERVER",
                "help": "why it found no host: its id, or its name if unique",
            },
        ),
        ("--flavor", {"metavar": "FLAVOR", "help": "would such a server find one? id or name"}),
        ("--image", {"metavar": "IMAGE", "help": "id or name; without, it asks for no hardware"}),
        (
            "--count",
            {"type": int, "default": 1, "metavar": "N", "help": "so many of them; default: 1"},
        ),
        ("--zone", {"metavar": "ZONE[:HOST[:NODE]]", "help": "as a user's availability_zone"}),
        ("--host", {"metavar": "HOST", "help": "on this one, if the filters let it"}),
        (
            "--project",
            {"metavar": "ID", "help": "of this project, for aggregates of single tenants"},
        ),
        ("--group", {"metavar": "ID", "help": "in this server group"}),
        (
            "--hint",
            {
                "action": "append",
                "default": [],
                "metavar": "NAME=VALUE",
                "help": "a scheduler hint; may be given several times",
            },
        ),
        _JSON,
    ),
    ("policy", "list"): (_JSON,),
    ("policy", "explain"): (
        ("rule", {"nargs": "?", "metavar": "RULE", "help": "its name, as policy list shows it"}),
        (
            "--as",
            {
                "dest": "roles",
                "action": "append",
                "default": [],
                "metavar": "ROLE",
                "help": "a caller with this role; may be given several times",
            },
        ),
        _JSON,
    ),
    ("consoles", "end"): (
        ("--server", {"metavar": "ID", "help": "those of this server"}),
        ("--all", {"action": "store_true", "help": "those of every server"}),
    ),
}
