# SPDX-License-Identifier: Apache-2.0
"""kilonova-console: the websocket proxy between browsers and the consoles of guests."""
