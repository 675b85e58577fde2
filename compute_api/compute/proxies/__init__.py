# SPDX-License-Identifier: Apache-2.0
"""Deprecated resources that pass the user's own token to another service."""
