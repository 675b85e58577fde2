# SPDX-License-Identifier: Apache-2.0
"""The console service: a websocket proxy between browsers and the consoles of guests."""
