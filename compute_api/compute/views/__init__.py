# SPDX-License-Identifier: Apache-2.0
"""What answers look like: one module a noun, as rows of ``fields.Field`` or small pure
functions."""
