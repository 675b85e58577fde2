# SPDX-License-Identifier: Apache-2.0
"""A cloud on one machine: up, down, the lab, and their checks and preparations."""
