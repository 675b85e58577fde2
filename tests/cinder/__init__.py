# SPDX-License-Identifier: Apache-2.0
"""The volume client, volume actions and volume moves with a real Cinder."""
