# SPDX-License-Identifier: Apache-2.0
"""Installation, start and surroundings of Kilonova on a machine.

Kilonova's processes do not import this package.
"""
