# SPDX-License-Identifier: Apache-2.0
"""Decides and remembers: carries out the actions that the API committed."""
