# SPDX-License-Identifier: Apache-2.0
"""Attacks from outside on a running cloud: ``python -m tests.attacks --home DIRECTORY``."""
