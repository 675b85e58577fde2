# SPDX-License-Identifier: Apache-2.0
"""The scheduler: proposes hosts for servers, best first, and explains each rejected host.

The scheduler never claims resources. The conductor claims a proposed host in the database.
"""
