# SPDX-License-Identifier: Apache-2.0
"""Transfer of a moving server's files: the source's agent serves, the destination's agent reads."""
