# SPDX-License-Identifier: Apache-2.0
"""The neighbours, reached only over their public HTTP APIs."""
