# SPDX-License-Identifier: Apache-2.0
"""What bodies and queries may hold: one module a noun, as JSON Schema with its changes by
microversion."""
