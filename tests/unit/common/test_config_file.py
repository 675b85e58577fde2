# SPDX-License-Identifier: Apache-2.0
"""Unknown sections and options of a configuration file, and the names suggested instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import common.rpc  # noqa: F401  # It must precede the import of oslo.messaging.
from common.domain import errors
from common.service import config, config_file


@pytest.fixture
def refusal(tmp_path: Path) -> Iterator[object]:
    """Return a function that loads these lines and returns the error without the path, or ""."""

    def load(*lines: str) -> str:
        path = tmp_path / "kilonova.conf"
        path.write_text("\n".join(lines) + "\n")
        try:
            config.load(str(path))
        except errors.ConfigError as problem:
            assert str(problem).startswith(f"{path}:")
            return str(problem).removeprefix(f"{path}:")
        return ""

    yield load
    config.CONF.clear()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[api]", "prot = 1"], "2: [api] has no option prot; the nearest is port"),
        (["[databse]", "url = x"], "1: there is no section [databse]; the nearest is [database]"),
        (
            ["[DEFAULT]", "", "# a remark", "fencing_hook = /bin/true"],
            "4: [DEFAULT] has no option fencing_hook; it belongs to [conductor]",
        ),
        (
            ["[DEFAULT]", "trasport_url = rabbit://"],
            "2: [DEFAULT] has no option trasport_url; the nearest is transport_url",
        ),
        (
            ["[api]", "qqq = 1"],
            "2: [api] has no option qqq; all are shown by: kilonova config sample",
        ),
        (
            ["[oslo_messaging_rabbit]", "heartbeat_rat = 2"],
            "2: [oslo_messaging_rabbit] has no option heartbeat_rat; the nearest is heartbeat_rate",
        ),
        (
            ["[vendordata_dynamic_auth]", "auth_type = password", "usrname = x"],
            "3: [vendordata_dynamic_auth] has no option usrname; the nearest is username",
        ),
        (
            ["[api]", "a = 1", "[tls]", "b = 2"],
            "2: [api] has no option a; all are shown by: kilonova config sample; 4: [tls] has no option "
            "b; all are shown by: kilonova config sample",
        ),
    ],
)
def test_config_load_refuses_unknown_name_and_suggests_any_near_name(
    refusal, lines: list[str], message: str
) -> None:
    assert refusal(*lines) == message


def test_config_load_error_names_five_unknown_options_and_counts_others(refusal) -> None:
    assert refusal("[api]", *(f"q{number} = 1" for number in range(8))).endswith(" (and 3 more)")


@pytest.mark.parametrize(
    "lines",
    [
        [
            "[DEFAULT]",
            "transport_url = rabbit://",
            "[api]",
            "public_url = http://here",
            "port: 8774",
        ],
        [
            "[oslo_limit]",
            "auth_type = password",
            "user_domain_name = Default",
            "system_scope = all",
        ],
        [
            "[oslo_limit]",
            "endpoint_id = 1",
            "timeout = 3",
            "valid_interfaces = x",
            "auth-url = http://x",
        ],
        ["[vendordata_dynamic_auth]", "auth_type = v3token", "token = x"],
        ["[vendordata_dynamic_auth]", "auth_section = elsewhere", "[elsewhere]", "username = x"],
        ["[scheduler]", "isolated_hosts = a,", "  b"],
    ],
)
def test_config_load_accepts_options_of_libraries_and_plugins(refusal, lines: list[str]) -> None:
    assert refusal(*lines) == ""


def test_library_options_equal_those_of_installed_oslo_messaging() -> None:
    from oslo_messaging import opts

    library_options = {group or "DEFAULT": options for group, options in opts.list_opts()}
    for section, names in config_file.LIBRARIES.items():
        older = {old.name for option in library_options[section] for old in option.deprecated_opts}
        assert {option.dest for option in library_options[section]} | (older & names) == names


def test_config_file_lines_have_section_value_and_number(tmp_path: Path) -> None:
    path = tmp_path / "one.conf"
    path.write_text("host = a\n[scheduler]\n# b\nisolated_hosts = c,\n    d\n\n[api]\nport = 1\n")
    assert config_file.lines(str(path)) == [
        config_file.Line("DEFAULT", "host", "a", 1),
        config_file.Line("scheduler", "isolated_hosts", "c,\nd", 4),
        config_file.Line("api", "port", "1", 8),
    ]


def test_agent_default_state_dir_differs_from_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "agent.conf"
    path.write_text("")
    folders = [str(config.load(str(path), process).state_dir) for process in ("agent", "api")]
    config.CONF.clear()
    assert folders == [config.AGENT_STATE, config.STATE]
