# SPDX-License-Identifier: Apache-2.0
"""What installs, starts and surrounds Kilonova on a machine; nothing in the four processes imports
from here."""
