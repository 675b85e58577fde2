# SPDX-License-Identifier: Apache-2.0
"""The ground: rules, records, store, messages. No process logic lives here."""

__version__ = "0.1.0"  #: of everything; setup.cfg reads it here
