# SPDX-License-Identifier: Apache-2.0
"""Secrets at rest: readable with the key only, also after the key was changed."""

from __future__ import annotations

import pytest

from common.domain import errors
from common.security.vault import SEALED, Vault

SECRETS = {"admin_pass": "correct horse"}


def test_what_was_sealed_is_opened_again_and_cannot_be_read() -> None:
    sealed = Vault("key").seal(SECRETS)
    assert "horse" not in sealed
    assert sealed != Vault("key").seal(SECRETS)
    assert Vault("key").open(sealed) == SECRETS


def test_an_older_key_still_opens_after_the_key_was_changed() -> None:
    sealed = Vault("old").seal(SECRETS)
    assert Vault("new, old").open(sealed) == SECRETS
    with pytest.raises(errors.Unavailable, match="another \\[DEFAULT\\] secret_key"):
        Vault("new").open(sealed)


def test_without_a_key_nothing_is_sealed() -> None:
    with pytest.raises(errors.Unavailable, match="no \\[DEFAULT\\] secret_key"):
        Vault("").seal(SECRETS)


def test_the_keys_do_not_print() -> None:
    assert "hidden" not in repr(Vault("hidden"))


def test_a_sealed_text_is_known_as_such_and_another_is_its_own_content() -> None:
    sealed = Vault("old").seal_text("Zm9ybWVy")
    assert sealed.startswith(SEALED) and "Zm9ybWVy" not in sealed
    assert Vault("new, old").open_text(sealed) == "Zm9ybWVy"
    assert Vault("").open_text("Zm9ybWVy") == "Zm9ybWVy"
    with pytest.raises(errors.Unavailable):
        Vault("new").open_text(sealed)
