# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of the system: states, records, verbs, errors and rules. Pure: no input or
output."""
