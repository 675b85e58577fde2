# SPDX-License-Identifier: Apache-2.0
"""The records, states, errors and rules that all packages share. Pure: no I/O."""
