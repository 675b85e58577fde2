# SPDX-License-Identifier: Apache-2.0
"""Response bodies: one module per resource, as rows of ``fields.Field`` or small pure functions."""
