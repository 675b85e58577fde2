# SPDX-License-Identifier: Apache-2.0
"""``kilonova setup controller`` and ``kilonova setup bundle``.

The tests cover the plan, repeats, interruptions before every change, and wrong input. The machine
and Keystone are doubles. The ring ``install`` runs the commands on real machines.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import conductor.service
from common.domain.errors import ConfigError
from common.security import tls
from common.service import config
from deploy.one_machine.cloud.authority import Authority
from deploy.operator.main import main, parser
from deploy.operator.setup import bundle, live_migration, plan, services
from deploy.operator.setup.configuration import PACKAGED, read_present
from deploy.operator.setup.controller import set_up_another, set_up_first
from deploy.operator.setup.keystone_client import KeystoneClient, read_admin
from deploy.operator.setup.machine import Machine
from deploy.operator.setup.plan import Step
from deploy.packages import ROOT
from tests.install.documentation import commands
from tests.unit.deploy.setup_doubles import FIRST, SECOND, UNITS, Effects, FakeKeystone, FakeMachine

URL, PUBLIC = "https://keystone.example:5000/v3", "https://cloud.example"
GIVEN: dict[str, str | None] = {"address": FIRST, "keystone": URL, "public": PUBLIC}
NO_OPTIONS: dict[str, str | None] = {"address": None, "keystone": None, "public": None}


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the options for other tests."""
    monkeypatch.setattr(services, "REPORT_SECONDS", 0.0)
    yield
    config.load("/dev/null")
    config.CONF.clear()


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "first")


@pytest.fixture
def keystone(machine: FakeMachine) -> FakeKeystone:
    return FakeKeystone(machine.effects)


def install(
    machine: FakeMachine, keystone: KeystoneClient, given: dict[str, str | None] = GIVEN
) -> None:
    set_up_first(machine, given, {}, lambda *_: keystone, yes=True)


def install_another(machine: FakeMachine, text: str) -> None:
    path = machine.etc / "bundle"
    path.write_text(text)
    set_up_another(machine, bundle.load(str(path)), yes=True)


def check_first(machine: FakeMachine, keystone: FakeKeystone) -> None:
    """Check that all parts of a first controller use the same passwords."""
    conf = config.load(str(machine.configuration))
    conductor.service.check_options(conf)
    assert machine.roles == {"kilonova": urlsplit(conf.database.url).password}
    assert machine.databases == {"kilonova"} and machine.has_tables
    [own] = keystone.rows["users"]
    assert (own["name"], own["password"]) == ("kilonova", conf.identity.password)
    names = {row["name"] for row in keystone.rows["roles"] if row["id"] in keystone.assigned}
    assert names == {"admin", "service"}
    assert {row["url"] for row in keystone.rows["endpoints"]} == {
        f"{PUBLIC}/v2.1",
        f"{PUBLIC}/placement",
    }
    broker = urlsplit(read_present(machine)["DEFAULT", "transport_url"])
    assert (broker.hostname, broker.port) == (FIRST, 5671) and machine.uses_tls
    passwords = {name: user["password"] for name, user in machine.users.items()}
    assert passwords.pop("guest") == "guest"
    assert passwords == {
        "kilonova": broker.password,
        "operator": urlsplit(conf.host_keys.management_url).password,
    }
    assert machine.users["operator"]["tags"] == ["administrator"]
    assert all(machine.users[name]["allowed"] for name in passwords)
    assert tls.protecting(conf, "my_ip", [FIRST], listens=True)
    assert machine.active == machine.enabled == set(UNITS)


def test_setup_controller_makes_first_controller_from_packages(
    machine: FakeMachine, keystone: FakeKeystone, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.configuration.write_text(PACKAGED.read_text())
    install(machine, keystone)
    check_first(machine, keystone)
    output = capsys.readouterr().out
    assert "to do  PostgreSQL: role and database kilonova" in output
    assert "nova-conductor   controller   0.1.0   up" in output
    assert "kilonova setup bundle --address IP - | ssh" in output
    assert machine.modes["kilonova.conf"] == (0o640, "root", "kilonova")
    assert machine.modes["controller.pem"] == (0o400, "rabbitmq", "rabbitmq")
    assert {mode for mode, _, _ in machine.modes.values()} <= {0o640, 0o400, 0o444, 0o644}


def test_setup_controller_puts_no_secret_into_arguments_or_output(
    machine: FakeMachine, keystone: FakeKeystone, capsys: pytest.CaptureFixture[str]
) -> None:
    install(machine, keystone)
    text = " ".join(machine.arguments) + capsys.readouterr().out
    secrets = [machine.roles["kilonova"], keystone.rows["users"][0]["password"]]
    secrets += [user["password"] for name, user in machine.users.items() if name != "guest"]
    secrets += [file.read_text().strip() for file in machine.configuration.parent.glob("secrets/*")]
    assert len(set(secrets)) == 9 and not [secret for secret in secrets if secret in text]


def test_setup_controller_repeated_without_options_changes_nothing(
    machine: FakeMachine, keystone: FakeKeystone, capsys: pytest.CaptureFixture[str]
) -> None:
    install(machine, keystone)
    count = machine.effects.count
    capsys.readouterr()
    install(machine, keystone, NO_OPTIONS)
    output = capsys.readouterr().out
    assert machine.effects.count == count and "to do" not in output
    assert "This command changed nothing." in output and "nova-scheduler" in output


def test_setup_controller_continues_after_interruption_before_every_change(tmp_path: Path) -> None:
    for number in itertools.count(1):
        effects = Effects()
        machine, keystone = (
            FakeMachine(tmp_path / str(number), FIRST, effects),
            FakeKeystone(effects),
        )
        effects.interrupt_at = number
        try:
            install(machine, keystone)
        except ConfigError as problem:
            assert "interrupted\nCorrect the cause, and run the same command again" in str(problem)
        else:
            break
        install(machine, keystone)
        check_first(machine, keystone)
    assert number > 30


def test_setup_controller_keeps_other_lines_of_the_operator(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    machine.configuration.write_text("# ours\n[identity]\nallow_plain_text = true\n")
    install(machine, keystone, {**GIVEN, "keystone": "http://keystone.example:5000"})
    conf = config.load(str(machine.configuration))
    assert conf.identity.allow_plain_text
    assert conf.identity.auth_url == "http://keystone.example:5000/v3"
    assert machine.configuration.read_text().startswith("# ours\n")


@pytest.mark.parametrize(
    ("lines", "option"),
    [
        ("[DEFAULT]\nmy_ip = 192.0.2.77\n", "[DEFAULT] my_ip = 192.0.2.77"),
        ("[console]\npublic_url = https://other.example\n", "[console] public_url = https://other"),
        (
            "[database]\nurl = postgresql+psycopg://kilonova:secret@db.example/kilonova\n",
            "[database] url = postgresql+psycopg://kilonova:***@db.example/kilonova",
        ),
    ],
)
def test_setup_controller_stops_at_other_value_before_any_change(
    machine: FakeMachine, keystone: FakeKeystone, lines: str, option: str
) -> None:
    machine.configuration.write_text(lines)
    with pytest.raises(ConfigError) as problem:
        install(machine, keystone)
    assert option in str(problem.value) and "secret" not in str(problem.value)
    assert machine.effects.count == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"address": None}, "give --address IP"),
        ({"address": "127.0.0.1"}, "give --address IP"),
        ({"address": "192.0.2.99"}, r"192\.0\.2\.99 is not an address of this machine"),
        ({"keystone": None}, "give --keystone URL"),
        ({"keystone": "keystone.example"}, "'keystone.example' is no URL"),
        ({"keystone": "http://keystone.example"}, "passwords would travel as plain text"),
        ({"public": None}, "give --public URL"),
    ],
)
def test_setup_controller_names_missing_or_unusable_option(
    machine: FakeMachine, keystone: FakeKeystone, given: dict[str, str | None], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        install(machine, keystone, {**GIVEN, **given})
    assert machine.effects.count == 0


def test_setup_controller_needs_root_and_names_missing_packages(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    machine.missing = {"rabbitmqctl", "kilonova-api"}
    with pytest.raises(ConfigError, match="missing: rabbitmq-server, kilonova-api"):
        install(machine, keystone)
    machine.is_root = False  # type: ignore[misc]  # no property in the double
    with pytest.raises(ConfigError, match="run it as root"):
        install(machine, keystone)


def test_setup_controller_without_terminal_needs_yes(
    machine: FakeMachine, keystone: FakeKeystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["n\n", "y\n"])
    terminal = SimpleNamespace(isatty=lambda: False, readline=lambda: next(answers))
    monkeypatch.setattr(sys, "stdin", terminal)
    for says in ("give --yes", "you did not agree"):
        with pytest.raises(ConfigError, match=says):
            set_up_first(machine, GIVEN, {}, lambda *_: keystone, yes=False)
        terminal.isatty = lambda: True
    assert machine.effects.count == 0
    set_up_first(machine, GIVEN, {}, lambda *_: keystone, yes=False)
    check_first(machine, keystone)


def test_setup_controller_reports_failed_step_with_reason(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    machine.problem = "image: does not work: Glance answers 503"
    with pytest.raises(ConfigError) as problem:
        install(machine, keystone)
    assert "check of the configuration" in str(problem.value)
    assert "image: does not work: Glance answers 503\nCorrect the cause" in str(problem.value)
    assert machine.active == set()
    machine.problem = ""
    install(machine, keystone)
    check_first(machine, keystone)


def test_setup_controller_keeps_foreign_roles_users_and_endpoints(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    machine.roles["kilonova"] = "foreign"
    with pytest.raises(ConfigError, match="role kilonova that does not accept the password"):
        install(machine, keystone)
    assert machine.roles.pop("kilonova") == "foreign"
    machine.users["operator"] = {"password": "foreign", "tags": []}
    with pytest.raises(ConfigError, match="rabbitmqctl delete_user operator"):
        install(machine, keystone)
    assert machine.users.pop("operator")["password"] == "foreign"
    own = {"id": "u", "name": "kilonova", "domain_id": "default", "password": "foreign"}
    keystone.rows["users"].append(own)
    with pytest.raises(ConfigError, match="user kilonova with another password"):
        install(machine, keystone)
    assert keystone.rows["users"] == [own]
    keystone.rows["users"].clear()
    keystone.rows["services"].append({"id": "s", "type": "compute"})
    nova = {"id": "e", "service_id": "s", "interface": "public", "region": "RegionOne"}
    keystone.rows["endpoints"].append({**nova, "url": "https://nova.example/v2.1"})
    with pytest.raises(ConfigError, match="openstack endpoint delete e"):
        install(machine, keystone)
    keystone.rows["endpoints"].clear()
    install(machine, keystone)
    check_first(machine, keystone)


def test_setup_controller_keeps_foreign_configuration_of_rabbitmq(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    (machine.etc / "rabbitmq/rabbitmq.conf").write_text("listeners.tcp = 5672\n")
    with pytest.raises(ConfigError, match=r"rabbitmq\.conf has other lines: add listeners"):
        install(machine, keystone)
    assert machine.effects.count == 0


def test_setup_controller_reports_silent_conductor(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    install(machine, keystone)
    machine.host_name = "other"  # type: ignore[misc]  # no property in the double
    service = services.Services(machine, services.PAIRED)
    machine.active.clear()
    with pytest.raises(ConfigError, match="nova-conductor, nova-scheduler .* did not report"):
        service.prove()


def test_keystone_client_names_missing_variables_of_admin() -> None:
    with pytest.raises(ConfigError, match="missing: OS_PASSWORD, OS_PROJECT_NAME"):
        read_admin({"OS_USERNAME": "admin"}, URL)
    variables = {"OS_USERNAME": "admin", "OS_PASSWORD": "x", "OS_PROJECT_NAME": "admin"}
    assert read_admin({**variables, "OS_USER_DOMAIN_ID": "default"}, URL).auth_url == URL


def test_keystone_client_names_unreachable_keystone() -> None:
    with pytest.raises(ConfigError, match=r"Keystone at http://127\.0\.0\.1:1/v3 \(--keystone\)"):
        KeystoneClient("http://127.0.0.1:1/v3", {}, "RegionOne").log_in("x")


def test_plan_reports_step_without_result() -> None:
    with pytest.raises(ConfigError, match=r"step 1 of 1 \(a\) failed: .* the result is missing"):
        plan.carry_out([Step("a", lambda: False, lambda: None)], yes=True)


def test_install_page_short_way_has_ten_valid_commands() -> None:
    page = ROOT / "docs/install.md"
    lines = re.sub(r"\\\n *", "", commands(page, "The short way")).splitlines()
    assert len(lines) == 10
    words = re.findall(r"\bkilonova ((?:setup|host|join) [^|'&\n]+)", "\n".join(lines))
    assert len(words) == 9
    for line in words:
        parser().parse_args(line.split())


# --- another controller ---
def make_bundle(machine: FakeMachine) -> str:
    return bundle.write(machine, SECOND, yes=True)


def test_setup_bundle_opens_postgresql_and_makes_another_controller(
    machine: FakeMachine, keystone: FakeKeystone, tmp_path: Path
) -> None:
    install(machine, keystone)
    first = config.load(str(machine.configuration))
    secrets = (first.secret_key, first.host_keys.command_secret, first.identity.password)
    text = make_bundle(machine)
    assert machine.hba.read_text().endswith(
        f"hostssl kilonova kilonova {SECOND}/32 scram-sha-256\n"
    )
    assert machine.settings["listen_addresses"] == f"localhost, {FIRST}"
    assert machine.modes["controller.pem"] == (0o400, "postgres", "postgres")
    second = FakeMachine(tmp_path / "second", SECOND)
    second.configuration.write_text(PACKAGED.read_text())
    install_another(second, text)
    conf = config.load(str(second.configuration))
    assert (conf.secret_key, conf.host_keys.command_secret, conf.identity.password) == secrets
    assert not conf.host_keys.management_url
    assert (conf.my_ip, conf.api.host, conf.placement.host) == (SECOND, SECOND, SECOND)
    assert conf.image_gateway.url == f"https://{FIRST}:9293"
    assert f"@{FIRST}/kilonova" in conf.database.url and conf.database.tls
    assert tls.protecting(conf, "my_ip", [SECOND], listens=True)
    assert second.active == second.enabled == {f"kilonova-{name}" for name in services.PAIRED}
    assert second.users.keys() == {"guest"} and not second.roles


def test_setup_bundle_and_controller_repeated_change_nothing(
    machine: FakeMachine, keystone: FakeKeystone, tmp_path: Path
) -> None:
    install(machine, keystone)
    second = FakeMachine(tmp_path / "second", SECOND)
    install_another(second, make_bundle(machine))
    counts = machine.effects.count, second.effects.count
    install_another(second, make_bundle(machine))
    install(machine, keystone, NO_OPTIONS)
    assert (machine.effects.count, second.effects.count) == counts


def test_setup_bundle_continues_after_interruption_before_every_change(
    machine: FakeMachine, keystone: FakeKeystone, tmp_path: Path
) -> None:
    install(machine, keystone)
    for number in itertools.count(1):
        second = FakeMachine(tmp_path / str(number), SECOND, machine.effects)
        machine.next_settings = machine.settings = {
            "listen_addresses": "localhost",
            "ssl_cert_file": "",
        }
        machine.hba.write_text("local all all peer\n")
        machine.effects.count, machine.effects.interrupt_at = 0, number
        try:
            install_another(second, make_bundle(machine))
        except ConfigError as problem:
            assert "interrupted" in str(problem)
        else:
            break
        install_another(second, make_bundle(machine))
        assert len(second.active) == 4 and machine.hba.read_text().count(SECOND) == 1
    assert number > 12


def test_setup_controller_refuses_bundle_of_another_cloud_or_machine(
    machine: FakeMachine, keystone: FakeKeystone, tmp_path: Path
) -> None:
    install(machine, keystone)
    text = make_bundle(machine)
    with pytest.raises(ConfigError, match=f"{SECOND} is not an address of this machine"):
        install_another(FakeMachine(tmp_path / "third", "192.0.2.12"), text)
    for name in ("tls/ca.pem", "secrets/DEFAULT.secret_key"):
        second = FakeMachine(tmp_path / name.replace("/", "-"), SECOND)
        (second.configuration.parent / name).write_text("other")
        with pytest.raises(ConfigError, match=name):
            install_another(second, text)
        assert second.effects.count == 0


def test_setup_controller_refuses_incomplete_bundle(
    machine: FakeMachine, keystone: FakeKeystone, tmp_path: Path
) -> None:
    install(machine, keystone)
    text = make_bundle(machine)
    content = json.loads(text)
    content["secrets"]["../evil"] = "x"
    for wrong in ("", text[:-20], "[]", '{"tls": {}}', json.dumps(content)):
        with pytest.raises(ConfigError, match="is no file of kilonova setup bundle, or not whole"):
            install_another(FakeMachine(tmp_path / str(len(wrong)), SECOND), wrong)


def test_setup_controller_refuses_bundle_with_other_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["setup", "controller", "--bundle", "x", "--address", SECOND]) == 1
    assert "leave --address, --keystone and --public out" in capsys.readouterr().err


def test_setup_bundle_refuses_machine_without_cloud_and_own_address(
    machine: FakeMachine, keystone: FakeKeystone
) -> None:
    with pytest.raises(ConfigError, match="this machine is no first controller"):
        make_bundle(machine)
    install(machine, keystone)
    with pytest.raises(ConfigError, match="give the address of the other controller"):
        bundle.write(machine, FIRST, yes=True)


def test_setup_bundle_file_is_readable_only_for_its_owner(
    machine: FakeMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bundle, "write", lambda *_, yes: "secrets")
    path = tmp_path / "second"
    assert main(["setup", "bundle", "--address", SECOND, str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600 and path.read_text() == "secrets"
    assert "Then delete both files" in capsys.readouterr().out
    assert main(["setup", "bundle", "--address", SECOND, "-"]) == 0
    assert capsys.readouterr().out == "secrets\n"


# --- live migration ---
@pytest.fixture
def host(machine: FakeMachine, tmp_path: Path) -> FakeMachine:
    """Return a machine that has joined, with a running agent."""
    files = Authority(tmp_path / "authority").issue("node1", FIRST)
    own = tmp_path / "host.pem"
    own.write_text(Path(files.cert).read_text() + Path(files.key).read_text())
    agent = machine.etc / "kilonova/agent.conf"
    lines = f"[migration]\nlive_migration_inbound_addr = {FIRST}\n"
    agent.write_text(f"[tls]\nca_file = {files.ca}\ncert_file = {own}\n{lines}")
    machine.agent_started = 1
    return machine


def test_setup_live_migration_gives_qemu_certificate_and_agent_options(
    host: FakeMachine, tmp_path: Path
) -> None:
    live_migration.set_up(host, yes=True)
    conf = config.load(str(host.etc / "kilonova/agent.conf"), config.AGENT)
    assert conf.migration.live_migration_with_native_tls
    assert conf.migration.live_migration_port == 16598
    assert conf.migration.live_migration_inbound_addr == FIRST
    folder = host.etc / "pki/qemu"
    assert folder.stat().st_mode & 0o777 == 0o755
    for side in ("server", "client"):
        text, key = ((folder / f"{side}-{kind}.pem").read_text() for kind in ("cert", "key"))
        assert (tmp_path / "host.pem").read_text() == text + key
        assert host.modes[f"{side}-key.pem"] == (0o640, "root", "libvirt-qemu")
    assert host.agent_started > 1


def test_setup_live_migration_repeated_changes_nothing_until_renewal(
    host: FakeMachine, tmp_path: Path
) -> None:
    live_migration.set_up(host, yes=True)
    count = host.effects.count
    live_migration.set_up(host, yes=True)
    assert host.effects.count == count
    renewed = Authority(tmp_path / "authority").issue("renewed", FIRST)
    text = Path(renewed.cert).read_text() + Path(renewed.key).read_text()
    (tmp_path / "host.pem").write_text(text)
    live_migration.set_up(host, yes=True)
    assert (host.etc / "pki/qemu/client-cert.pem").read_text() == Path(renewed.cert).read_text()
    assert host.effects.count == count + 5


def test_setup_live_migration_continues_after_interruption(host: FakeMachine) -> None:
    for number in itertools.count(1):
        host.effects.count, host.effects.interrupt_at = 0, number
        try:
            live_migration.set_up(host, yes=True)
        except ConfigError as problem:
            assert "interrupted" in str(problem)
        else:
            break
    assert number > 5 and host.agent_started > 1


def test_setup_live_migration_needs_joined_host(machine: FakeMachine) -> None:
    (machine.etc / "kilonova/agent.conf").write_text("[DEFAULT]\nhost = node1\n")
    with pytest.raises(ConfigError, match="First run: kilonova join TOKEN"):
        live_migration.set_up(machine, yes=True)


def test_machine_run_uses_umask_022_in_process_with_umask_077() -> None:
    """The command itself has umask 077. With it, RabbitMQ could not read its list of plugins."""
    before = os.umask(0o077)
    try:
        result = Machine().run(sys.executable, "-c", "import os; print(oct(os.umask(0)))")
    finally:
        os.umask(before)
    assert result.output == "0o22"
