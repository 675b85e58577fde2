# SPDX-License-Identifier: Apache-2.0
"""Commands on hosts: join, identity, drain, evacuation, adoption."""
