# SPDX-License-Identifier: Apache-2.0
"""The metadata service for guests at 169.254.169.254."""
