# SPDX-License-Identifier: Apache-2.0
"""``kilonova join``.

The tests cover the checks of the machine before the command uses the token, the files that the
command writes, and the start of the agent.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from oslo_config import cfg

from common.domain import errors
from common.domain.errors import ConfigError
from common.rpc.host_credentials import TokenState
from common.security import certificates, private_files
from common.security.host_joins import JoinToken
from common.service import config
from deploy.one_machine.cloud.authority import Authority
from deploy.operator import config_check
from deploy.operator.hosts import join, join_checks
from deploy.operator.hosts.join_files import HEAD, Owner, merged
from deploy.operator.main import main
from tests.unit.common.test_host_joins import TOKEN

#: A valid token with the address of a broker that does not exist.
UNREACHABLE_BROKER_TOKEN = JoinToken("h1", 1, "ab" * 32, "rabbit://u:p@127.0.0.1:1/")
OWN_USER = pwd.getpwuid(os.geteuid()).pw_name


def broker(name: str = "127.0.0.1") -> Any:
    return SimpleNamespace(hosts=[SimpleNamespace(hostname=name, port=5671)])


@pytest.fixture
def conf(tmp_path: Path) -> Iterator[cfg.ConfigOpts]:
    path = tmp_path / "agent.conf"
    path.write_text(f"[DEFAULT]\nstate_dir = {tmp_path}/not/yet\n")
    yield config.load(str(path), config.AGENT)
    config.CONF.clear()


def token_state(seconds: float = 0, is_heard: bool = False) -> TokenState:
    """Return a conductor's answer. The conductor's clock is ``seconds`` ahead of the host's."""
    return TokenState(int((time.time() + seconds) * 1e6), "", "192.0.2.7", False, is_heard)


# --- checks ---
@pytest.mark.parametrize(("seconds", "way"), [(30, "ahead of"), (-4000, "behind")])
def test_join_refuses_wrong_clock(seconds: int, way: str) -> None:
    with pytest.raises(ConfigError, match=rf"{abs(seconds)} s {way} the cloud's: .*NTP"):
        join_checks.clock(lambda: token_state(-seconds))


def test_join_reports_clock_difference() -> None:
    state, difference = join_checks.clock(lambda: token_state(0))
    assert state.address == "192.0.2.7" and difference == "0.0 s from the cloud's"


def test_join_accepts_loopback_address_only_when_configured() -> None:
    with pytest.raises(ConfigError, match=r"by 127\.0\.0\.1, .*--address IP"):
        join_checks.address(None, "", None, broker())
    for given, invited, configured in (
        ("127.0.0.1", "", None),
        (None, "127.0.0.1", None),
        (None, "", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "192.0.2.1"),
    ):
        assert join_checks.address(given, invited, configured, broker()) == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "invited", "says"),
    [
        ("192.0.2.200", "", r"192\.0\.2\.200 is not an address of this machine"),
        (None, "192.0.2.200", r"192\.0\.2\.200 is not an address of this machine"),
        (None, "a name", "a name is not an address of this machine"),
        ("127.0.0.1", "127.0.0.2", "--address is 127.0.0.1, but kilonova host add got"),
    ],
)
def test_join_refuses_foreign_address_or_address_other_than_of_host_add(
    given: str | None, invited: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        join_checks.address(given, invited, None, broker())


def test_join_without_given_address_or_route_to_broker_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no route to the broker"):
        join_checks.address(None, "", None, broker("no-such-name.invalid"))


def test_join_refuses_silent_libvirt(conf: cfg.ConfigOpts, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_unavailable(conf: cfg.ConfigOpts) -> str:
        raise errors.Unavailable("libvirt does not answer.")

    monkeypatch.setattr(config_check, "libvirt", raise_unavailable)
    with pytest.raises(ConfigError, match="does not answer. Install libvirt-daemon-system"):
        join_checks.libvirt(conf)


@pytest.mark.parametrize("works", [True, False])
def test_join_reports_kvm_or_emulation_and_refuses_missing_required_kvm(
    conf: cfg.ConfigOpts, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    checked_folders: list[Path] = []
    monkeypatch.setattr(
        "compute_agent.virt.libvirt.host.host.kvm_works",
        lambda folder: checked_folders.append(folder) or works,
    )
    text = join_checks.acceleration(conf)
    assert text.startswith("KVM works" if works else "emulation, ten times slower")
    conf.set_override("virt_type", "qemu", group="agent")
    assert join_checks.acceleration(conf) == "emulation, because [agent] virt_type is qemu"
    conf.set_override("virt_type", "kvm", group="agent")
    if not works:
        with pytest.raises(ConfigError, match="virt_type is kvm: .*modprobe"):
            join_checks.acceleration(conf)
    conf.set_override("driver", "memory", group="agent")
    assert join_checks.acceleration(conf).startswith("no guests run")
    assert len(checked_folders) == (1 if works else 2)
    conf.clear_override("virt_type", group="agent")
    conf.clear_override("driver", group="agent")


def test_join_refuses_disk_without_space(
    conf: cfg.ConfigOpts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def set_free_gib(gib: float) -> None:
        monkeypatch.setattr(
            "shutil.disk_usage",
            lambda folder: SimpleNamespace(free=gib * 2**30) if folder == tmp_path else None,
        )

    set_free_gib(40)
    assert join_checks.space(conf) == f"40 GiB for guests in {tmp_path}/not/yet"
    set_free_gib(1.5)
    with pytest.raises(ConfigError, match=r"has 1\.5 GiB left for guests: free some space"):
        join_checks.space(conf)
    set_free_gib(40)
    conf.set_override("reserved_disk_gb", 39, group="agent")
    with pytest.raises(ConfigError, match=r"has 1\.0 GiB left"):
        join_checks.space(conf)
    conf.clear_override("reserved_disk_gb", group="agent")


def test_join_accepts_only_certificate_of_this_host_and_cloud(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    good = ours.issue("h1", "192.0.2.7")
    text = join_checks.certificate(good.cert, good.key, good.ca, "192.0.2.7")
    assert text.startswith(f"{good.cert}, for 192.0.2.7, until 20")
    with pytest.raises(ConfigError, match=r"names 192\.0\.2\.7, and not 192\.0\.2\.8"):
        join_checks.certificate(good.cert, good.key, good.ca, "192.0.2.8")
    named = ours.issue("h2", "node7.example")
    with pytest.raises(ConfigError, match="names no address"):
        join_checks.certificate(named.cert, named.key, named.ca, "192.0.2.7")
    foreign_certificate = others.issue("h1", "192.0.2.7")
    with pytest.raises(ConfigError, match="not signed by the authority of this cloud"):
        join_checks.certificate(
            foreign_certificate.cert, foreign_certificate.key, good.ca, "192.0.2.7"
        )
    with pytest.raises(ConfigError, match="--cert-file .*--key-file"):
        join_checks.certificate(good.cert, named.key, good.ca, "192.0.2.7")


def test_certificate_signed_only_by_authority_in_its_own_file_is_refused(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    foreign = others.issue("h1", "192.0.2.7")
    with Path(foreign.cert).open("a") as file:
        file.write(others.path.read_text())
    with pytest.raises(ConfigError, match="not signed by the authority of this cloud"):
        join_checks.certificate(foreign.cert, foreign.key, str(ours.path), "192.0.2.7")


def test_join_accepts_certificate_of_intermediate_authority_in_same_file(tmp_path: Path) -> None:
    root, middle = Authority(tmp_path / "root", "root"), Authority(tmp_path / "middle", "middle")
    files = middle.issue("h1", "192.0.2.7")
    own = x509.load_pem_x509_certificate(middle.path.read_bytes())
    root_certificate = x509.load_pem_x509_certificate(root.path.read_bytes())
    intermediate = (
        certificates.builder(
            root_certificate.subject, own.subject, own.public_key(), datetime.now(UTC)
        )
        .not_valid_after(own.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(load_pem_private_key(root.key_path.read_bytes(), None), hashes.SHA256())
    )
    with Path(files.cert).open("a") as file:
        file.write(certificates.pem(intermediate))
    text = join_checks.certificate(files.cert, files.key, str(root.path), "192.0.2.7")
    assert text.startswith(f"{files.cert}, for 192.0.2.7, until 20")


# --- files ---
OPTIONS = {"DEFAULT": {"host": "h1"}, "tls": {"ca_file": "/etc/ca.pem", "cert_file": "/etc/h.pem"}}


def test_join_writes_options_to_new_configuration_file(tmp_path: Path) -> None:
    assert merged(tmp_path / "agent.conf", OPTIONS) == (
        HEAD + "[DEFAULT]\nhost = h1\n[tls]\nca_file = /etc/ca.pem\ncert_file = /etc/h.pem\n"
    )


def test_join_keeps_lines_of_operator_in_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.conf"
    path.write_text("# ours\n[agent]\nworkers = 4\n[tls]\n# theirs\nca_file = /etc/ca.pem\n")
    assert merged(path, OPTIONS) == (
        "# ours\n[agent]\nworkers = 4\n[tls]\ncert_file = /etc/h.pem\n# theirs\n"
        "ca_file = /etc/ca.pem\n[DEFAULT]\nhost = h1\n"
    )
    path.write_text(merged(path, OPTIONS))
    assert merged(path, OPTIONS) == path.read_text()
    with pytest.raises(ConfigError, match=r"has \[DEFAULT\] host = h1, but this machine needs h2"):
        merged(path, {"DEFAULT": {"host": "h2"}})


def test_join_repeated_with_dollar_in_value_keeps_configuration_file(tmp_path: Path) -> None:
    path, options = tmp_path / "agent.conf", {"DEFAULT": {"host": "h$1"}}
    path.write_text(merged(path, options))
    assert merged(path, options) == path.read_text()


def test_join_refuses_malformed_configuration_file_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.conf"
    path.write_text("[DEFAULT]\nhost\n")
    with pytest.raises(ConfigError, match=f"{path}: at line 2, .*Correct the line"):
        merged(path, OPTIONS)


def test_join_file_replacement_has_given_mode_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "host.key"
    path.write_text("older")
    private_files.replace(path, "newer", 0o640, (os.geteuid(), os.getegid()))
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("newer", 0o640)
    assert list(tmp_path.iterdir()) == [path]


def test_join_names_missing_user() -> None:
    assert Owner.named(OWN_USER).is_us
    with pytest.raises(ConfigError, match="there is no user kilonova-x: .*--user"):
        Owner.named("kilonova-x")


# --- the command, before the token is used ---
@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", "this is no token of a host"),
        (TOKEN.text()[:-8], "the token is not whole"),
        (UNREACHABLE_BROKER_TOKEN.text(), "the broker does not answer"),
    ],
)
def test_join_with_invalid_token_or_unreachable_broker_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], token: str, says: str
) -> None:
    path = tmp_path / "etc/agent.conf"
    words = ["--config", str(path), "join", token, "--no-start", "--user", OWN_USER]
    assert main(words) == 1
    assert says in capsys.readouterr().err.lower()
    assert not path.parent.exists()
    config.CONF.clear()


def test_join_refuses_configuration_of_another_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "agent.conf"
    path.write_text("[DEFAULT]\nhost = h9\n")
    words = [
        "--config",
        str(path),
        "join",
        UNREACHABLE_BROKER_TOKEN.text(),
        "--no-start",
        "--user",
        OWN_USER,
    ]
    assert main(words) == 1
    assert "[DEFAULT] host = h9, but this machine needs h1" in capsys.readouterr().err
    assert path.read_text() == "[DEFAULT]\nhost = h9\n"


# --- the unit ---
class FakeControlPlane:
    """A control plane that has contact with the agent from the third look on, or never."""

    def __init__(self, hears: bool = True) -> None:
        self.looks, self._hears = 0, hears

    def look(self) -> TokenState:
        self.looks += 1
        if self.looks == 1:
            raise errors.NoAnswer("it restarts just now")
        return token_state(is_heard=self._hears and self.looks > 2)


@pytest.fixture
def systemctl_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the arguments of the calls of systemctl, which all succeed."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(join_checks, "systemctl", lambda *words: commands.append(words) or "")
    monkeypatch.setattr(join, "PAUSE_SECONDS", 0.01)
    return commands


def test_join_starts_agent_and_waits_for_its_contact(
    systemctl_calls: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    control_plane = FakeControlPlane()
    join.start_agent(control_plane)  # type: ignore[arg-type]  # all that it asks
    assert systemctl_calls == [("enable", "kilonova-agent"), ("restart", "kilonova-agent")]
    assert control_plane.looks == 3 and "has heard it" in capsys.readouterr().out


def test_join_reports_agent_without_contact_or_masked_unit(
    systemctl_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "HEARD_SECONDS", 0.1)
    with pytest.raises(ConfigError, match="no conductor has heard .*journalctl -u kilonova-agent"):
        join.start_agent(FakeControlPlane(hears=False))  # type: ignore[arg-type]  # all that it asks
    monkeypatch.setattr(join_checks, "systemctl", lambda *words: "Unit is masked.")
    with pytest.raises(ConfigError, match="systemctl enable kilonova-agent: Unit is masked"):
        join.start_agent(FakeControlPlane())  # type: ignore[arg-type]  # all that it asks


def test_join_requires_systemd_and_unit_before_start(
    systemctl_calls: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: str(self) == "/run/systemd/system")
    join_checks.unit()
    assert systemctl_calls == [("cat", "kilonova-agent.service")]
    monkeypatch.setattr(join_checks, "systemctl", lambda *words: "No files found.")
    with pytest.raises(ConfigError, match="systemd knows no kilonova-agent.service: .*--no-start"):
        join_checks.unit()
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    with pytest.raises(ConfigError, match="systemd does not run here: give --no-start"):
        join_checks.unit()


def test_join_systemctl_returns_error_of_failed_or_missing_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text('#!/bin/sh\n[ "$2" = fail ] || exit 0\necho "why: $3" >&2\nexit 4\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert join_checks.systemctl("start", "x") == ""
    assert join_checks.systemctl("fail", "x") == "why: x"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "systemctl" in join_checks.systemctl("start", "x")


def test_join_runs_without_packages_of_control_plane() -> None:
    """The packages of the extra ``agent`` suffice."""
    blocked = ("sqlalchemy", "alembic", "falcon", "gunicorn", "numpy", "keystonemiddleware")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "from deploy.operator.main import main; import deploy.operator.hosts.join; sys.exit(main(['join', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1 and "this is no token of a host" in done.stderr
