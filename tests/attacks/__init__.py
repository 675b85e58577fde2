# SPDX-License-Identifier: Apache-2.0
"""Attacks on a cloud that runs, from outside: ``python -m tests.attacks --home
/var/lib/kilonova-up``."""
