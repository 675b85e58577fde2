# SPDX-License-Identifier: Apache-2.0
"""The lines of a configuration file, and which of them nobody would read.

oslo.config reads only what is asked for, so that a misspelt option is silently its default. Called
by ``common.service.config``. The options of libraries stand here by name, because to ask the
libraries costs their import in each process; a test compares the two.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oslo_config import cfg, iniparser

MAX_SHOWN = 5  #: unknown names that one refusal tells of
#: oslo.messaging's and keystoneauth's own, by section.
LIBRARIES: dict[str, frozenset[str]] = {
    "DEFAULT": frozenset(
        [
            "control_exchange",
            "executor_thread_pool_size",
            "rpc_ping_enabled",
            "rpc_response_timeout",
            "rpc_thread_pool_size",
            "transport_url",
        ]
    ),
    "oslo_messaging_notifications": frozenset(["driver", "retry", "topics", "transport_url"]),
    "oslo_messaging_rabbit": frozenset(
        [
            "amqp_auto_delete",
            "amqp_durable_queues",
            "conn_pool_min_size",
            "conn_pool_ttl",
            "direct_mandatory_flag",
            "enable_cancel_on_failover",
            "heartbeat_rate",
            "heartbeat_timeout_threshold",
            "hostname",
            "kombu_compression",
            "kombu_failover_strategy",
            "kombu_missing_consumer_retry_timeout",
            "kombu_reconnect_delay",
            "kombu_reconnect_splay",
            "kombu_reconnect_timeout",
            "processname",
            "rabbit_ha_queues",
            "rabbit_interval_max",
            "rabbit_login_method",
            "rabbit_qos_prefetch_count",
            "rabbit_quorum_delivery_limit",
            "rabbit_quorum_max_memory_bytes",
            "rabbit_quorum_max_memory_length",
            "rabbit_quorum_queue",
            "rabbit_retry_backoff",
            "rabbit_retry_interval",
            "rabbit_stream_fanout",
            "rabbit_transient_queues_ttl",
            "rabbit_transient_quorum_queue",
            "rpc_conn_pool_size",
            "ssl",
            "ssl_ca_file",
            "ssl_cert_file",
            "ssl_enforce_fips_mode",
            "ssl_enforce_hostname_verification",
            "ssl_key_file",
            "ssl_version",
            "use_queue_manager",
        ]
    ),
}
#: Sections of keystoneauth, whose options are those of the plug-in that auth_type names.
LOGINS = {
    "oslo_limit": frozenset(
        [
            "endpoint_id",
            "endpoint_service_name",
            "endpoint_service_type",
            "endpoint_region_name",
            "endpoint_interface",
        ]
    ),
    "vendordata_dynamic_auth": frozenset(),
}


@dataclass(frozen=True)
class Line:
    """An option as a file has it; ``number`` is that of its first line."""

    section: str
    option: str
    value: str
    number: int


class _Lines(iniparser.BaseParser):
    """Keeps what oslo.config's own parser reads, with the numbers of lines."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Line] = []
        self.sections: dict[str, int] = {}
        self._section, self._began = "DEFAULT", 0

    def new_section(self, section: str) -> None:
        self._section = section
        self.sections.setdefault(section, self.lineno)

    def _split_key_value(self, line: str) -> tuple[str, list[str]]:
        self._began = self.lineno
        key, value = super()._split_key_value(line)
        return str(key), list(value)

    def assignment(self, key: str, value: list[str]) -> None:
        self.found.append(Line(self._section, key, "\n".join(value), self._began))


def lines(path: str) -> list[Line]:
    """Every option that the file sets, in its order. The file has been read by oslo.config."""
    return _parsed(path).found


def _parsed(path: str) -> _Lines:
    parser = _Lines()
    parser.parse(Path(path).read_text().splitlines(keepends=True))
    return parser


def unknown(path: str, options: Mapping[str, Iterable[cfg.Opt]]) -> str:
    """What of the file nobody would read, each with the nearest right name; "" when all is known.

    ``options``: ours, by section."""
    parsed = _parsed(path)
    known = {section: _names(listed) for section, listed in options.items()}
    for section, names in LIBRARIES.items():
        known.setdefault(section, set()).update(names)
    logins = {line.value for line in parsed.found if line.option == "auth_section"} | LOGINS.keys()
    for section in logins & parsed.sections.keys():
        known[section] = _login(section, parsed.found)
    shown = list(_described(parsed, known, logins))
    more = f" (and {len(shown) - MAX_SHOWN} more)" if len(shown) > MAX_SHOWN else ""
    return f"{path}:" + "; ".join(shown[:MAX_SHOWN]) + more if shown else ""


def refused_credentials(
    path: str | None, given: Iterable[str], options: Mapping[str, Iterable[cfg.Opt]]
) -> str:
    """What is wrong with systemd's credentials of these names; "" when nothing is. Names of other
    sections are somebody else's."""
    said = {(line.section, line.option): line for line in lines(path)} if path else {}
    for section, name in (name.split(".") for name in sorted(given)):
        names = _names(options.get(section, ())) | LIBRARIES.get(section, set())
        if names and name not in names:
            return f"credential {section}.{name}: there is no such option{_nearest(name, sorted(names), '{}')}"
        if (section, name) in said:
            return (
                f"{path}:{said[section, name].number}: [{section}] {name} is a credential of systemd too: take "
                "one of the two away"
            )
    return ""


def _described(parsed: _Lines, known: Mapping[str, set[str]], logins: set[str]) -> Iterator[str]:
    sections = sorted({*known, *logins})
    for section, number in parsed.sections.items():
        if section not in known:
            yield f"{number}: there is no section [{section}]{_nearest(section, sections, '[{}]')}"
    for line in parsed.found:
        if line.section not in known or line.option in known[line.section]:
            continue
        homes = [section for section in sorted(known) if line.option in known[section]]
        hint = (
            f"; it belongs to [{homes[0]}]"
            if len(homes) == 1
            else _nearest(line.option, sorted(known[line.section]), "{}")
        )
        yield f"{line.number}: [{line.section}] has no option {line.option}{hint}"


def _nearest(name: str, names: list[str], form: str) -> str:
    found = difflib.get_close_matches(name, names, 1, 0.5)
    if found:
        return f"; the nearest is {form.format(found[0])}"
    return "; all are shown by: kilonova config sample"


def _names(options: Iterable[cfg.Opt]) -> set[str]:
    """As oslo.config finds them in a file."""
    return {str(name) for option in options for name in (option.dest, option.name)}


def _login(section: str, found: Iterable[Line]) -> set[str]:
    """The options of a section in which a user of keystoneauth stands."""
    from keystoneauth1 import exceptions, loading

    wanted = [line.value for line in found if (line.section, line.option) == (section, "auth_type")]
    try:
        plugin = loading.get_auth_plugin_conf_options(wanted[-1] if wanted else "password")
    except exceptions.NoMatchingPlugin:  # which is said, with the option's name, by who logs in
        plugin = []
    taken = [
        *plugin,
        *loading.get_session_conf_options(),
        *loading.get_adapter_conf_options(),
        *loading.get_auth_common_conf_options(),
    ]
    older = {str(old.name) for option in taken for old in option.deprecated_opts}
    return _names(taken) | older | LOGINS.get(section, frozenset())
