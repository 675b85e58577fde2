# SPDX-License-Identifier: Apache-2.0
"""The metadata service: what guests find at 169.254.169.254."""
