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
        "upgrade the database to this version; may be repeated",
    ),
    ("database", "version"): (
        "deploy.operator.database",
        "version",
        "show the version of the database and the version needed",
    ),
    ("database", "reseal"): (
        "deploy.operator.database",
        "reseal",
        "encrypt all stored secrets with the first secret_key",
    ),
    ("database", "purge"): (
        "deploy.operator.database",
        "purge",
        "remove old rows of deleted servers, ended actions and expired tokens",
    ),
    ("upgrade", "check"): (
        "deploy.operator.upgrade",
        "check",
        "show what is left to do before or after an upgrade of the cloud",
    ),
    ("doctor",): (
        "deploy.operator.doctor.command",
        "doctor",
        "check the invariants of the whole cloud, and repair findings with --fix",
    ),
    ("timeline",): (
        "deploy.operator.timeline",
        "timeline",
        "show the actions of a server or a request: user, steps, hosts and durations",
    ),
    ("status",): (
        "deploy.operator.status",
        "status",
        "show services, actions in hand and stuck actions",
    ),
    ("hosts",): (
        "deploy.operator.hosts.list",
        "hosts",
        "list all hosts: zone, state, free resources, problems",
    ),
    ("host", "add"): (
        "deploy.operator.hosts.identity",
        "add",
        "print a token for kilonova join, valid once within an hour",
    ),
    ("host", "rotate"): (
        "deploy.operator.hosts.identity",
        "rotate",
        "rotate a host's keys and its broker password",
    ),
    ("host", "secrets"): (
        "deploy.operator.hosts.secrets",
        "show",
        "show which hosts have the keys of today's secrets",
    ),
    ("host", "remove"): (
        "deploy.operator.hosts.identity",
        "remove",
        "remove an empty host and revoke its keys",
    ),
    ("host", "drain"): (
        "deploy.operator.hosts.actions",
        "drain",
        "disable a host and move its servers away",
    ),
    ("host", "restore"): (
        "deploy.operator.hosts.restore",
        "restore",
        "use a host again after a drain or forced_down",
    ),
    ("host", "evacuate"): (
        "deploy.operator.hosts.actions",
        "evacuate",
        "recreate the servers of a dead host on other hosts",
    ),
    ("host", "removals"): (
        "deploy.operator.hosts.removals",
        "removals",
        "show guests that hosts still have to remove",
    ),
    ("host", "adopt"): (
        "deploy.operator.hosts.adopt",
        "adopt",
        "create the server's record for a guest without one",
    ),
    ("host", "discard"): (
        "deploy.operator.hosts.discard",
        "discard",
        "remove a guest that has no record from its host",
    ),
    ("broker", "add"): (
        "deploy.operator.hosts.broker_roles",
        "add",
        "create the broker's user of a control plane role",
    ),
    ("broker", "remove"): (
        "deploy.operator.hosts.broker_roles",
        "remove",
        "delete the broker's user of a role",
    ),
    ("broker", "restore"): (
        "deploy.operator.hosts.broker_restore",
        "restore",
        "create all users at a broker that has lost them, or has old rights",
    ),
    ("action", "list"): (
        "deploy.operator.actions",
        "listed",
        "list actions in hand, or only stuck ones",
    ),
    ("action", "show"): (
        "deploy.operator.actions",
        "show",
        "show the progress of an action, and its last error",
    ),
    ("action", "retry"): (
        "deploy.operator.actions",
        "retry",
        "continue a stuck action at its current step",
    ),
    ("action", "abort"): (
        "deploy.operator.actions",
        "abort",
        "undo a stuck action",
    ),
    ("action", "fail"): (
        "deploy.operator.actions",
        "fail",
        "end a stuck action as failed; its server goes to ERROR",
    ),
    ("explain",): (
        "deploy.operator.explain",
        "explain",
        "explain why a server found no host, or whether a new one would",
    ),
    ("cleanup", "list"): (
        "deploy.operator.cleanups",
        "show",
        "list pending cleanups with their last error",
    ),
    ("cleanup", "retry"): (
        "deploy.operator.cleanups",
        "retry",
        "run a pending cleanup within seconds",
    ),
    ("cleanup", "cancel"): (
        "deploy.operator.cleanups",
        "cancel",
        "cancel a pending cleanup; its object remains",
    ),
    ("consoles", "list"): ("deploy.operator.consoles", "show", "list open console sessions"),
    ("consoles", "end"): (
        "deploy.operator.consoles",
        "end",
        "end the consoles of a server, or all",
    ),
    ("policy", "list"): (
        "deploy.operator.policy",
        "listed",
        "list every policy rule with its check and origin",
    ),
    ("policy", "explain"): (
        "deploy.operator.policy",
        "explain",
        "explain whether a role passes a rule",
    ),
    ("host", "verify"): (
        "deploy.operator.hosts.verify",
        "verify",
        "verify a host: create a server there, reach it, delete it",
    ),
    ("join",): (
        "deploy.operator.hosts.join",
        "join",
        "make this machine a host, with a token of host add",
    ),
    ("setup", "controller"): (
        "deploy.operator.setup.controller",
        "controller",
        "install a controller; may be repeated, and continues after an interruption",
    ),
    ("setup", "bundle"): (
        "deploy.operator.setup.bundle",
        "bundle",
        "write all files that another controller needs into one file",
    ),
    ("setup", "live-migration"): (
        "deploy.operator.setup.live_migration",
        "live_migration",
        "let this host migrate running servers; may be repeated",
    ),
    ("config", "sample"): (
        "deploy.operator.config",
        "sample",
        "print a configuration file with every option",
    ),
    ("config", "check"): (
        "deploy.operator.config_check",
        "check",
        "check the configuration and each external service",
    ),
    ("config", "show"): (
        "deploy.operator.config_show",
        "show",
        "show every option with its value and origin; secrets are hidden",
    ),
}

#: First words of several commands -> help text.
NOUNS = {
    "database": "the database: upgrade, version, reseal, purge",
    "upgrade": "an upgrade of the cloud: check",
    "cleanup": "pending cleanups: list, retry, cancel",
    "consoles": "open console sessions: list, end",
    "host": "a host: add, verify, rotate, remove, drain, restore, evacuate, removals, adopt, discard; all: secrets",
    "broker": "users at the broker: add or remove that of a role, restore all",
    "action": "actions in hand and stuck actions: list, show, retry, abort, fail",
    "policy": "policy rules: list, explain",
    "config": "the configuration file: sample, check, show",
    "setup": "installation of a machine: controller, bundle, live-migration",
}


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address") from problem


def _kind_of_rows(text: str) -> str:
    from deploy.operator.store.purge import KINDS

    if text not in (names := [kind.name for kind in KINDS]):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
    return text


_JSON: tuple[str, dict[str, Any]] = (
    "--json",
    {"action": "store_true", "help": "print one JSON document"},
)
_AGENT: tuple[str, dict[str, Any]] = (
    "--agent",
    {
        "action": "store_true",
        "help": "the file is a host's configuration, as is a file named agent.conf",
    },
)
_ID: tuple[str, dict[str, Any]] = (
    "id",
    {"type": _positive, "metavar": "ID", "help": "as shown by list"},
)
_HOST: tuple[str, dict[str, Any]] = ("host", {"metavar": "HOST"})
_GUEST: tuple[str, dict[str, Any]] = (
    "server",
    {"metavar": "SERVER", "help": "the server's id, as kilonova doctor shows it"},
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
    {"action": "store_true", "help": "only print the destinations"},
)
_STOP: tuple[str, dict[str, Any]] = (
    "--stop",
    {
        "action": "store_true",
        "help": "start no more moves, and end after those under way",
    },
)
_PARALLEL: tuple[str, dict[str, Any]] = (
    "--parallel",
    {
        "type": _positive,
        "default": 2,
        "metavar": "N",
        "help": "number of servers that move at a time; default: 2",
    },
)
_YES: tuple[str, dict[str, Any]] = (
    "--yes",
    {"action": "store_true", "help": "carry out the plan without a question"},
)
#: Options that exclude each other.
ONE_OF: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--live",
        {
            "action": "store_false",
            "dest": "cold",
            "default": False,
            "help": "live-migrate running servers (default)",
        },
    ),
    (
        "--cold",
        {
            "action": "store_true",
            "dest": "cold",
            "default": False,
            "help": "stop, move and start running servers",
        },
    ),
)
#: Words of the command -> its arguments, as for ``add_argument``.
ARGUMENTS: dict[tuple[str, ...], tuple[tuple[str, dict[str, Any]], ...]] = {
    ("config", "check"): (
        _AGENT,
        ("--no-external-services", {"action": "store_true", "help": "only check the file"}),
    ),
    ("config", "show"): (
        _AGENT,
        ("--set", {"action": "store_true", "help": "only options that differ from their default"}),
        _JSON,
    ),
    ("setup", "controller"): (
        (
            "--address",
            {
                "type": _address,
                "metavar": "IP",
                "help": "the address at which hosts and other controllers reach this machine",
            },
        ),
        (
            "--keystone",
            {"metavar": "URL", "help": "Keystone's URL for the services; default: $OS_AUTH_URL"},
        ),
        (
            "--public",
            {
                "metavar": "URL",
                "help": "the URL of your TLS proxy, at which users reach the APIs and consoles",
            },
        ),
        (
            "--bundle",
            {
                "metavar": "FILE",
                "help": "make this machine another controller, with the file of kilonova setup bundle; -: "
                "read from standard input",
            },
        ),
        _YES,
    ),
    ("setup", "bundle"): (
        (
            "--address",
            {
                "type": _address,
                "required": True,
                "metavar": "IP",
                "help": "the address of the other controller",
            },
        ),
        ("file", {"metavar": "FILE", "help": "the file to write; -: standard output"}),
        _YES,
    ),
    ("setup", "live-migration"): (_YES,),
    ("doctor",): (
        _JSON,
        ("--no-hosts", {"action": "store_true", "help": "do not query the hosts"}),
        (
            "--fix",
            {
                "action": "append",
                "default": [],
                "metavar": "ID",
                "help": "repair the finding with this id; may be given several times",
            },
        ),
    ),
    ("database", "purge"): (
        (
            "--older-than",
            {
                "type": _positive,
                "metavar": "DAYS",
                "help": "rows that ended so many days ago; default: depends on the kind",
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
        ("--dry-run", {"action": "store_true", "help": "only print the number of rows"}),
    ),
    ("hosts",): (_JSON,),
    ("timeline",): (
        (
            "about",
            {
                "metavar": "SERVER|REQUEST",
                "help": "the server's id or name, or a request id (req-…)",
            },
        ),
        _JSON,
    ),
    ("host", "add"): (
        _HOST,
        (
            "--address",
            {
                "type": _address,
                "metavar": "IP",
                "help": "the host's address, for its certificate if [tls] ca_key_file is set",
            },
        ),
        (
            "--broker",
            {
                "action": "append",
                "default": [],
                "metavar": "HOST[:PORT]",
                "help": "the broker's address for hosts; default: as in transport_url; may be given several times",
            },
        ),
        (
            "--file",
            {
                "metavar": "FILE",
                "help": "write the host's keys to this file instead of printing a token",
            },
        ),
    ),
    ("host", "remove"): (_HOST,),
    ("host", "verify"): (
        _HOST,
        ("--image", {"metavar": "ID", "help": "default: the smallest one"}),
        ("--flavor", {"metavar": "ID", "help": "default: the smallest one for the image"}),
        (
            "--network",
            {
                "metavar": "ID",
                "help": "attach a port of this network and test ssh; this machine must reach the network",
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
        (
            "token",
            {
                "metavar": "TOKEN",
                "help": "the token that kilonova host add printed; -: read from standard input",
            },
        ),
        (
            "--address",
            {
                "type": _address,
                "metavar": "IP",
                "help": "the address at which other machines reach this host; default: the address given to "
                "host add, else the address from which this machine reaches the broker",
            },
        ),
        (
            "--cert-file",
            {
                "metavar": "FILE",
                "help": "the host's certificate (PEM), if none comes with the token",
            },
        ),
        (
            "--key-file",
            {"metavar": "FILE", "help": "the key of the certificate; default: in the same file"},
        ),
        (
            "--user",
            {
                "default": "kilonova-agent",
                "metavar": "NAME",
                "help": "the user of the agent; default: kilonova-agent",
            },
        ),
        (
            "--no-start",
            {"action": "store_true", "help": "write the files without starting the agent"},
        ),
    ),
    ("host", "rotate"): (
        _HOST,
        _FILE,
        (
            "--now",
            {
                "action": "store_true",
                "help": "revoke the old keys and close the host's connections at once",
            },
        ),
    ),
    ("host", "secrets"): (
        (
            "--wait",
            {
                "action": "store_true",
                "help": "wait up to two minutes until all hosts that are up have them",
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
            {
                "action": "store_true",
                "help": "continue until the servers that cannot move now have moved too",
            },
        ),
    ),
    ("host", "restore"): (_HOST,),
    ("host", "evacuate"): (
        _HOST,
        _DRY,
        _STOP,
        _PARALLEL,
        ("--yes", {"action": "store_true", "help": "evacuate even if many hosts are down at once"}),
    ),
    ("broker", "add"): (_ROLE, _ROLE_FILE),
    ("broker", "remove"): (_ROLE,),
    ("broker", "restore"): (
        (
            "--role-file",
            {
                "metavar": "FILE",
                "action": "append",
                "help": "the configuration of a role with a transport_url of its own; may be given "
                "several times",
            },
        ),
        (
            "--file",
            {
                "metavar": "FILE",
                "help": "the file of definitions to write without a management API; default: "
                "broker-definitions.json",
            },
        ),
    ),
    ("host", "removals"): (
        ("host", {"nargs": "?", "metavar": "HOST", "help": "only this host; default: all hosts"}),
        _JSON,
    ),
    ("host", "adopt"): (
        _HOST,
        _GUEST,
        (
            "--yes",
            {"action": "store_true", "help": "write the record; without it only show the record"},
        ),
        (
            "--force",
            {"action": "store_true", "help": "ignore quota and free resources of the host"},
        ),
        (
            "--replace",
            {
                "action": "store_true",
                "help": "remove the guest, with its disk, on the host in the server's record",
            },
        ),
        (
            "--name",
            {
                "metavar": "NAME",
                "help": "name of the server, instead of the host's; the next options likewise",
            },
        ),
        ("--project", {"metavar": "ID"}),
        ("--user", {"metavar": "ID"}),
        ("--flavor", {"metavar": "FLAVOR", "help": "id or name"}),
        ("--image", {"metavar": "IMAGE", "help": "id or name"}),
    ),
    ("host", "discard"): (
        _HOST,
        _GUEST,
        (
            "--yes",
            {
                "action": "store_true",
                "help": "remove the guest and its disk; without it only show the effect",
            },
        ),
    ),
    ("action", "list"): (
        ("--stuck", {"action": "store_true", "help": "only actions that need an operator"}),
        _JSON,
    ),
    ("action", "show"): (("id", {"metavar": "ID"}), _JSON),
    **{("action", way): (_IDS,) for way in ("retry", "abort", "fail")},
    ("cleanup", "list"): (_JSON,),
    ("cleanup", "retry"): (_ID,),
    ("cleanup", "cancel"): (_ID,),
    ("explain",): (
        (
            "server",
            {
                "nargs": "?",
                "metavar": "SERVER",
                "help": "explain why this server (id, or unique name) found no host",
            },
        ),
        (
            "--flavor",
            {
                "metavar": "FLAVOR",
                "help": "explain whether a server of this flavor (id or name) would find a host",
            },
        ),
        (
            "--image",
            {"metavar": "IMAGE", "help": "id or name; without an image no hardware is requested"},
        ),
        (
            "--count",
            {"type": int, "default": 1, "metavar": "N", "help": "number of servers; default: 1"},
        ),
        (
            "--zone",
            {"metavar": "ZONE[:HOST[:NODE]]", "help": "as in availability_zone of a request"},
        ),
        ("--host", {"metavar": "HOST", "help": "only this host, if it passes the filters"}),
        (
            "--project",
            {"metavar": "ID", "help": "the project, for aggregates of single tenants"},
        ),
        ("--group", {"metavar": "ID", "help": "the server group"}),
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
        (
            "rule",
            {"nargs": "?", "metavar": "RULE", "help": "name of the rule, as policy list shows it"},
        ),
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
        ("--server", {"metavar": "ID", "help": "only the consoles of this server"}),
        ("--all", {"action": "store_true", "help": "the consoles of all servers"}),
    ),
}
