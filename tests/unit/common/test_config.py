# SPDX-License-Identifier: Apache-2.0
"""Options of the configuration file: wrong values, defaults, secrets and vendor data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from oslo_config import cfg

from common.domain import errors
from common.service import config

EVERY = [(group, option) for group, options in config.OPTIONS.items() for option in options]
#: Options that accept any text, so that a wrong value shows only in use.
FREE_TEXT = {
    "DEFAULT.state_dir",
    "DEFAULT.secret_key",
    "agent.volume_folders",
    "api.public_url",
    "api.policy_file",
    "scheduler.enabled_filters",
    "scheduler.isolated_images",
    "scheduler.isolated_hosts",
    "scheduler.aggregate_image_properties_isolation_namespace",
    "scheduler.aggregate_image_properties_isolation_separator",
    "scheduler.default_availability_zone",
    "scheduler.default_schedule_zone",
    "host_keys.command_secret",
    "host_keys.query_secret",
    "agent.key_file",
    "agent.image_user",
    "agent.libvirt_uri",
    "identity.username",
    "identity.password",
    "identity.project_name",
    "identity.domain",
    "identity.region",
    "image.endpoint",
    "network.endpoint",
    "share.endpoint",
    "volume.endpoint",
    "image_gateway.ticket_secret",
    "metadata.proxy_shared_secret",
    "metadata.vendor_data_file",
    "vendor_data.dynamic_targets",
    "vendor_data.dynamic_ssl_certfile",
    "console.allowed_origins",
    "spice.html5",
    "console.novnc",
    "scheduler.enabled_weighers",
    "scheduler.image_props_weight_setting",
    "metrics.weight_setting",
    "placement.policy_file",
    "conductor.fencing_hook",
    "migration.transfer_cert",
    "migration.transfer_key",
    "migration.transfer_ca",
    "migration.live_migration_inbound_addr",
    "notifications.versioned_notifications_topics",
    "tls.ca_file",
    "tls.ca_key_file",
    "tls.cert_file",
    "tls.key_file",
}


def full_name(case: tuple[str, cfg.Opt]) -> str:
    return f"{case[0]}.{case[1].dest}"


@pytest.fixture
def load(tmp_path: Path) -> Iterator[object]:
    def write_and_load(*lines: str) -> cfg.ConfigOpts:
        path = tmp_path / "kilonova.conf"
        path.write_text("\n".join(lines) + "\n")
        return config.load(str(path))

    yield write_and_load
    config.CONF.clear()


def wrong_values(option: cfg.Opt) -> list[tuple[str, str]]:
    """Return pairs of a wrong value for this option and a text of the error message."""
    kind = option.type
    pairs = []
    if isinstance(option, (cfg.IntOpt, cfg.FloatOpt, cfg.PortOpt)):
        pairs.append(("seven", "seven"))
        if getattr(kind, "min", None) is not None:
            pairs.append((str(kind.min - 1), f"{kind.min:g}"))
        if getattr(kind, "max", None) is not None:
            pairs.append((str(kind.max + 1), str(kind.max)))
    elif getattr(kind, "choices", None):
        pairs.append(("nothing-of-the-kind", str(next(iter(kind.choices)))))
    elif isinstance(option, cfg.HostAddressOpt):
        pairs.append(("not a host!", "not a host!"))
    elif isinstance(option, cfg.BoolOpt):
        pairs.append(("perhaps", "perhaps"))
    elif option.dest == "pci_alias":
        pairs += [
            (wrong, "must be a JSON list")
            for wrong in (
                "gpu",
                "[1]",
                '{"name": "gpu"}',
                '[{"name": "gpu", "vendor_id": "10de"}]',
                '[{"name": "a b", "vendor_id": "10de", "product_id": "1db4"}]',
                '[{"name": "gpu", "vendor_id": "10de", "product_id": "0x1db4"}]',
            )
        ]
    elif option.dest == "providers":
        pairs.append(("static, elsewhere", "dynamic"))
    elif option.dest == "instance_usage_audit_period":
        pairs += [
            (wrong, "must be like month or day@18") for wrong in ("week", "day@24", "month@29")
        ]
    elif option.dest in ("cpu_shared_set", "cpu_dedicated_set", "pci_devices"):
        pairs += [(wrong, "must be like") for wrong in ("all", "0-3;5", "0-", "0000:81:00.8")]
    elif option.dest == "unified_limits_resource_list":
        pairs += [(wrong, "must be like") for wrong in ("cores", "class:vcpu", "servers, class:")]
    elif option.dest == "broker_addresses":
        pairs += [(wrong, wrong) for wrong in ("rabbit://node", "user@node", "node:amqp")]
    elif option.dest == "direct_proxies":
        pairs += [(wrong, wrong) for wrong in ("spice.example", "192.0.2.0/24")]
    elif option.dest == "direct_proxy_base_url":
        pairs += [(wrong, "must be like") for wrong in ("spice.example", "ftp://x")]
    elif option.dest.endswith("_volume_protocols"):
        pairs.append(("iscsi, smoke", "iscsi"))
    elif option.dest == "compute_monitors":
        pairs.append(("cpu.guess", "cpu.virt_driver"))
    elif type(kind).__name__ == "Url":
        pairs.append(("ftp://x", "must start with one of"))
    return pairs


WRONG = [
    (group, option, value, message)
    for group, option in EVERY
    for value, message in wrong_values(option)
]


ONE_OF_EACH_TYPE = {type(wrong[1].type).__name__: wrong for wrong in WRONG}


def test_only_listed_free_text_options_accept_every_value() -> None:
    assert {full_name(case) for case in EVERY if not wrong_values(case[1])} == FREE_TEXT


def test_option_refuses_wrong_value_and_message_shows_allowed_values() -> None:
    accepted = []
    for group, option, value, message in WRONG:
        try:
            option.type(value)
        except ValueError as problem:
            if message in str(problem):
                continue
        accepted.append((group, option.dest, value))
    assert accepted == []


@pytest.mark.parametrize("wrong", ONE_OF_EACH_TYPE.values(), ids=ONE_OF_EACH_TYPE)
def test_config_load_with_wrong_value_names_file_and_option(
    load, wrong: tuple[str, cfg.Opt, str, str]
) -> None:
    group, option, value, message = wrong
    with pytest.raises(errors.ConfigError) as refused:
        load(f"[{group}]", f"{option.dest} = {value}")
    text = str(refused.value)
    assert option.dest in text and message in text and "kilonova.conf" in text


def test_option_has_help_and_valid_default() -> None:
    assert [full_name(case) for case in EVERY if not case[1].help] == []
    assert [
        full_name((group, option))
        for group, option in EVERY
        if option.default is not None and option.dest != "host"
        if option.type(option.default) != option.default
    ] == []


def test_config_load_returns_values_of_the_file_and_defaults(load) -> None:
    conf = load(
        "[DEFAULT]",
        "host = h7",
        "[api]",
        "workers = 3",
        "[database]",
        "url = sqlite:////x.db",
        "[scheduler]",
        "enabled_filters = A,B",
        "[agent]",
        "cpu_allocation_ratio = 1.5",
    )
    assert (conf.host, conf.api.workers, conf.database.url) == ("h7", 3, "sqlite:////x.db")
    assert (conf.scheduler.enabled_filters, conf.agent.cpu_allocation_ratio) == (["A", "B"], 1.5)
    assert conf.conductor.batch == 64


def test_pci_alias_option_groups_devices_by_alias(load) -> None:
    rows = ", ".join(
        f'{{"name": "{name}", "vendor_id": "10DE", "product_id": "{product}"}}'
        for name, product in (("gpu", "1db4"), ("nic", "1572"), ("gpu", "1db5"))
    )
    assert load("[api]", f"pci_alias = [{rows}]").api.pci_alias == {
        "gpu": [("10de", "1db4"), ("10de", "1db5")],
        "nic": [("10de", "1572")],
    }


def test_config_load_of_missing_file_names_the_sample_command(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="kilonova config sample"):
        config.load(str(tmp_path / "absent.conf"))


def test_config_load_refuses_lock_timeout_from_half_of_statement_timeout(load) -> None:
    assert load("[database]\nlock_timeout = 4\nstatement_timeout = 9\n").database.lock_timeout == 4
    with pytest.raises(
        errors.ConfigError,
        match=r"lock_timeout \(5\) must be less than half of statement_timeout \(10\)",
    ):
        load("[database]\nlock_timeout = 5\n")


def test_only_listed_options_with_secrets_are_marked_secret() -> None:
    assert {full_name(case) for case in EVERY if case[1].secret} == {
        "DEFAULT.secret_key",
        "database.url",
        "host_keys.command_secret",
        "host_keys.management_url",
        "host_keys.query_secret",
        "identity.password",
        "image_gateway.ticket_secret",
        "metadata.proxy_shared_secret",
    }


def test_config_load_error_leaves_out_secret_value(load) -> None:
    with pytest.raises(errors.ConfigError) as refused:
        load("[database]", "url = oracle://scott:TIGER@host/x")
    assert "must start with one of" in str(refused.value)
    assert "TIGER" not in str(refused.value)


def test_vendor_data_file_without_json_object_is_refused(load, tmp_path: Path) -> None:
    assert config.vendor_data(load("[DEFAULT]")) == {}
    file = tmp_path / "vendor.json"
    conf = load("[metadata]", f"vendor_data_file = {file}")
    for wrong in (None, "[1]", "{"):
        if wrong:
            file.write_text(wrong)
        with pytest.raises(errors.ConfigError, match=r"vendor_data_file .*vendor.json"):
            config.vendor_data(conf)
    file.write_text('{"ntp": "n1"}')
    assert config.vendor_data(conf) == {"ntp": "n1"}
