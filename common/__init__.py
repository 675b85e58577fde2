# SPDX-License-Identifier: Apache-2.0
"""The ground: rules, records, store, messages. No process logic lives here."""
