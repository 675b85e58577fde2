# SPDX-License-Identifier: Apache-2.0
"""What each operation does: one module a noun, functions of (request, …) that return a body."""
