# SPDX-License-Identifier: Apache-2.0
"""A host in memory: its guests, files and incoming migrations, without the verbs."""
