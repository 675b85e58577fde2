# SPDX-License-Identifier: Apache-2.0
"""``Vault``: sealing and opening of stored secrets, also after a change of the key."""

from __future__ import annotations

import pytest

from common.domain import errors
from common.security.vault import SEALED, Vault

SECRETS = {"admin_pass": "correct horse"}


def test_vault_seal_hides_secrets_and_open_returns_them() -> None:
    sealed = Vault("key").seal(SECRETS)
    assert "horse" not in sealed
    assert sealed != Vault("key").seal(SECRETS)
    assert Vault("key").open(sealed) == SECRETS


def test_vault_opens_secrets_sealed_with_an_older_key() -> None:
    sealed = Vault("old").seal(SECRETS)
    assert Vault("new, old").open(sealed) == SECRETS
    with pytest.raises(errors.Unavailable, match="another \\[DEFAULT\\] secret_key"):
        Vault("new").open(sealed)


def test_vault_seal_without_a_key_raises_unavailable() -> None:
    with pytest.raises(errors.Unavailable, match="no \\[DEFAULT\\] secret_key"):
        Vault("").seal(SECRETS)


def test_vault_repr_hides_the_key() -> None:
    assert "hidden" not in repr(Vault("hidden"))


def test_vault_open_text_returns_unsealed_text_unchanged() -> None:
    sealed = Vault("old").seal_text("Zm9ybWVy")
    assert sealed.startswith(SEALED) and "Zm9ybWVy" not in sealed
    assert Vault("new, old").open_text(sealed) == "Zm9ybWVy"
    assert Vault("").open_text("Zm9ybWVy") == "Zm9ybWVy"
    with pytest.raises(errors.Unavailable):
        Vault("new").open_text(sealed)
