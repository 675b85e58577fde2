# SPDX-License-Identifier: Apache-2.0
"""Keys, certificates, tickets and limits: how processes authenticate each other."""
