# SPDX-License-Identifier: Apache-2.0
"""The placement service: resource providers and what they have, in Placement's API 1.0 to 1.39."""
