# SPDX-License-Identifier: Apache-2.0
"""A host in memory, without the verbs: guests, files and incoming migrations."""
