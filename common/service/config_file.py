# SPDX-License-Identifier: Apache-2.0
"""The lines of a configuration file, and a check for unknown options.

oslo.config reads only registered options, so a misspelt option would silently keep the default.
Used by ``common.service.config``. Options of libraries are listed here by name, because importing
the libraries in each process is slow. A test compares the lists with the libraries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oslo_config import cfg, iniparser

#: The number of unknown names that an error shows.
MAX_SHOWN = 5
#: Options of oslo.messaging and keystoneauth, by section.
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
#: Sections of keystoneauth. Their other options are those of the plug-in in auth_type.
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
    """An option in a file. ``number`` is the number of its first line, from 1."""

    section: str
    option: str
    value: str
    number: int


class _Lines(iniparser.BaseParser):
    """Records the lines that oslo.config's own parser reads, with their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[Line] = []
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
        self.options.append(Line(self._section, key, "\n".join(value), self._began))


def lines(path: str) -> list[Line]:
    """Return every option that the file sets, in order, with value and line number.

    oslo.config must have accepted the file before.
    """
    return _parse(path).options


def _parse(path: str) -> _Lines:
    parser = _Lines()
    parser.parse(Path(path).read_text().splitlines(keepends=True))
    return parser


def unknown(path: str, options: Mapping[str, Iterable[cfg.Opt]]) -> str:
    """Return a text that lists the file's unknown sections and options with the nearest names.

    The text lists at most ``MAX_SHOWN`` of them and the number of the others. It is "" if all are
    known.

    Args:
        path: Path of the file.
        options: Kilonova's own options, by section. Options of libraries are known in any case.
    """
    parser = _parse(path)
    known_options = {
        section: _names(section_options) for section, section_options in options.items()
    }
    for section, names in LIBRARIES.items():
        known_options.setdefault(section, set()).update(names)
    logins = {
        line.value for line in parser.options if line.option == "auth_section"
    } | LOGINS.keys()
    for section in logins & parser.sections.keys():
        known_options[section] = _login(section, parser.options)
    descriptions = list(_describe_unknown(parser, known_options, logins))
    more = f" (and {len(descriptions) - MAX_SHOWN} more)" if len(descriptions) > MAX_SHOWN else ""
    return f"{path}:" + "; ".join(descriptions[:MAX_SHOWN]) + more if descriptions else ""


def refused_credentials(
    path: str | None, credentials: Iterable[str], options: Mapping[str, Iterable[cfg.Opt]]
) -> str:
    """Return a text about the first credential, by name, that cannot be used, or "".

    That is a credential of an unknown option, or of an option that the file sets too. Credentials
    of unknown sections are ignored, because they belong to other programs.

    Args:
        path: Path of the configuration file, or None.
        credentials: Names of credentials (SECTION.OPTION).
        options: Kilonova's own options, by section.
    """
    options_set = {(line.section, line.option): line for line in lines(path)} if path else {}
    for section, name in (name.split(".") for name in sorted(credentials)):
        names = _names(options.get(section, ())) | LIBRARIES.get(section, set())
        if names and name not in names:
            return f"credential {section}.{name}: there is no such option{_nearest(name, sorted(names), '{}')}"
        if (section, name) in options_set:
            return f"{path}:{options_set[section, name].number}: [{section}] {name} is also a credential: remove one"
    return ""


def _describe_unknown(
    parsed: _Lines, known_options: Mapping[str, set[str]], logins: set[str]
) -> Iterator[str]:
    sections = sorted({*known_options, *logins})
    for section, number in parsed.sections.items():
        if section not in known_options:
            yield f"{number}: there is no section [{section}]{_nearest(section, sections, '[{}]')}"
    for line in parsed.options:
        if line.section not in known_options or line.option in known_options[line.section]:
            continue
        homes = [
            section for section in sorted(known_options) if line.option in known_options[section]
        ]
        hint = (
            f"; it belongs to [{homes[0]}]"
            if len(homes) == 1
            else _nearest(line.option, sorted(known_options[line.section]), "{}")
        )
        yield f"{line.number}: [{line.section}] has no option {line.option}{hint}"


def _nearest(name: str, names: list[str], form: str) -> str:
    matches = difflib.get_close_matches(name, names, 1, 0.5)
    if matches:
        return f"; the nearest is {form.format(matches[0])}"
    return "; all are shown by: kilonova config sample"


def _names(options: Iterable[cfg.Opt]) -> set[str]:
    """Return the names by which oslo.config finds these options in a file."""
    return {str(name) for option in options for name in (option.dest, option.name)}


def _login(section: str, lines: Iterable[Line]) -> set[str]:
    """Return the names of the options that keystoneauth reads in a section with a login.

    These depend on the section's ``auth_type``, by default password. For an unknown type,
    only the options that all types share are returned.
    """
    from keystoneauth1 import exceptions, loading

    auth_types = [
        line.value for line in lines if (line.section, line.option) == (section, "auth_type")
    ]
    try:
        plugin = loading.get_auth_plugin_conf_options(auth_types[-1] if auth_types else "password")
    except (
        exceptions.NoMatchingPlugin
    ):  # The client that authenticates raises this error with the name of the option.
        plugin = []
    options = [
        *plugin,
        *loading.get_session_conf_options(),
        *loading.get_adapter_conf_options(),
        *loading.get_auth_common_conf_options(),
    ]
    older = {str(old.name) for option in options for old in option.deprecated_opts}
    return _names(options) | older | LOGINS.get(section, frozenset())
