# SPDX-License-Identifier: Apache-2.0
"""Keys of hosts: their owners, purposes, generations and the key file."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.domain import errors
from common.security.host_keys import (
    OF_A_HOST,
    AllKeys,
    Generations,
    NotGenuine,
    OwnKeys,
    Purpose,
    derive,
)

SECRETS = {Purpose.COMMAND: "one", Purpose.QUERY: "two"}


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Table:
    """A stand-in for the database's key generations that counts the reads."""

    def __init__(self, **hosts: Generations) -> None:
        self.hosts, self.looks, self.clock = dict(hosts), 0, Clock()
        self.is_away = False

    def __call__(self) -> dict[str, Generations]:
        self.looks += 1
        if self.is_away:
            raise errors.NoStore("It does not answer.")
        return dict(self.hosts)

    def keys(self, secrets: dict[Purpose, str] = SECRETS) -> AllKeys:
        return AllKeys(secrets, self, self.clock)  # type: ignore[arg-type]  # Clock has the used methods.


def test_host_key_opens_only_text_sealed_with_the_same_key_and_header() -> None:
    key = derive("one", "h1", 1, Purpose.COMMAND)
    sealed = key.seal(b"secret", b"header")
    assert b"secret" not in sealed
    assert derive("one", "h1", 1, Purpose.COMMAND).open(sealed, b"header") == b"secret"
    others = [
        derive("one", "h2", 1, Purpose.COMMAND),
        derive("one", "h1", 2, Purpose.COMMAND),
        derive("one", "h1", 1, Purpose.QUERY),
        derive("two", "h1", 1, Purpose.COMMAND),
    ]
    for other, text, header in [
        (key, sealed, b"another"),
        (key, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"header"),
        (key, b"", b"header"),
        (key, b"x" * 12, b"header"),
        *((other, sealed, b"header") for other in others),
    ]:
        with pytest.raises(NotGenuine):
            other.open(text, header)


def test_own_keys_contain_only_the_keys_of_the_host() -> None:
    control = Table(h1=Generations(3), h2=Generations(3)).keys()
    own = control.for_host("h1", "rabbit://h1")
    for purpose in OF_A_HOST:
        assert (
            own.newest("h1", purpose)
            == control.newest("h1", purpose)
            != control.newest("h2", purpose)
        )
    for host, generation in (("h2", 3), ("h1", 2)):
        with pytest.raises(NotGenuine):
            own.find(host, generation, Purpose.COMMAND)


def test_host_keys_without_secret_of_a_purpose_raise_unavailable() -> None:
    """For example, the API cannot create a command."""
    api = Table(h1=Generations(1)).keys({Purpose.COMMAND: "", Purpose.QUERY: "two"})
    assert api.newest("h1", Purpose.QUERY)
    with pytest.raises(errors.Unavailable, match="no secret"):
        api.newest("h1", Purpose.COMMAND)


def test_previous_key_generation_is_accepted_only_while_allowed() -> None:
    table = Table(h1=Generations(1))
    keys = table.keys()
    assert keys.find("h1", 1, Purpose.COMMAND).generation == 1
    table.hosts["h1"], table.clock.now = Generations(2, accepts_previous=True), 10
    assert [keys.find("h1", generation, Purpose.COMMAND).generation for generation in (1, 2)] == [
        1,
        2,
    ]
    assert keys.newest("h1", Purpose.COMMAND).generation == 2
    table.hosts["h1"], table.clock.now = Generations(2), 20
    for generation in (0, 1, 3):
        with pytest.raises(NotGenuine, match="is not valid, the newest is"):
            keys.find("h1", generation, Purpose.COMMAND)
    del table.hosts["h1"]
    table.clock.now = 30
    with pytest.raises(NotGenuine, match="host add"):
        keys.find("h1", 2, Purpose.COMMAND)


def test_unknown_hosts_cause_few_reads_of_key_generations() -> None:
    table = Table(h1=Generations(1))
    keys = table.keys()
    for number in range(100):
        table.clock.now += 0.01
        with pytest.raises(NotGenuine):
            keys.find(f"stranger-{number}", 1, Purpose.COMMAND)
    assert table.looks <= 11
    table.hosts["h2"] = Generations(1)
    table.clock.now += 0.2
    assert keys.find("h2", 1, Purpose.COMMAND), "a new host is accepted at once"


def test_host_keys_query_an_unavailable_database_once_a_second() -> None:
    table = Table(h1=Generations(1))
    keys, looked_at = table.keys(), []
    table.is_away = True
    for number in range(25):
        table.clock.now, looks = number / 10, table.looks
        with pytest.raises(errors.Unavailable):
            keys.find("h1", 1, Purpose.COMMAND)
        looked_at += [table.clock.now] * (table.looks - looks)
    assert looked_at == [0.0, 1.0, 2.0]
    table.is_away, table.clock.now = False, 3.1
    assert keys.find("h1", 1, Purpose.COMMAND)


def test_own_keys_in_key_file_are_read_back_and_hide_secrets_in_repr(tmp_path: Path) -> None:
    own = Table(h1=Generations(2)).keys().for_host("h1", "rabbit://h1:x@broker/")
    path = tmp_path / "host.key"
    path.write_text(own.text())
    path.chmod(0o600)
    assert OwnKeys.read(path, "h1") == own
    assert "x@broker" not in repr(own) and own.secrets[Purpose.COMMAND] not in repr(own)
    assert own.secrets[Purpose.COMMAND] not in repr(own.newest("h1", Purpose.COMMAND))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "has no key file .*kilonova host add h1"),
        ("{", 0o600, "cannot be used"),
        (
            '{"host": "h1", "generation": 1, "keys": {"command": "ab", "query": "cd"}}',
            0o600,
            "cannot be used",
        ),
        ("good", 0o640, "others may read"),
        ("good h2", 0o600, "is of host h2"),
    ],
)
def test_own_keys_read_of_missing_or_unusable_key_file_names_the_reason(
    tmp_path: Path, text: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "host.key"
    if text is not None:
        host = "h2" if text == "good h2" else "h1"
        good = Table(**{host: Generations(1)}).keys().for_host(host).text()
        path.write_text(good if text.startswith("good") else text)
        path.chmod(mode)
    with pytest.raises(ValueError, match=message):
        OwnKeys.read(path, "h1")


def test_key_of_two_secrets_seals_with_first_and_opens_with_both() -> None:
    table = Table(h1=Generations(1, accepts_previous=True))
    old, both, new = (
        table.keys({Purpose.COMMAND: text, Purpose.QUERY: text})
        for text in ("old", " new , old", "new")
    )
    key = both.newest("h1", Purpose.COMMAND)
    for one in (old, new):
        sealed = one.newest("h1", Purpose.COMMAND).seal(b"plain", b"header")
        assert key.open(sealed, b"header") == b"plain"
    sealed = key.seal(b"plain", b"header")
    assert new.newest("h1", Purpose.COMMAND).open(sealed, b"header") == b"plain"
    with pytest.raises(NotGenuine):
        old.newest("h1", Purpose.COMMAND).open(sealed, b"header")
    host = both.for_host("h1")
    assert host.newest("h1", Purpose.QUERY) == both.newest("h1", Purpose.QUERY)
    assert both.broker_passwords("h1") == [
        one.broker_password("h1", number) for number in (1, 0) for one in (new, old)
    ]
