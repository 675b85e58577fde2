# SPDX-License-Identifier: Apache-2.0
"""Hosts as a whole: joins, certificates, drain, evacuation, fencing."""
