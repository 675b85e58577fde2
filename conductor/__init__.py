# SPDX-License-Identifier: Apache-2.0
"""The conductor: executes the actions that the API has committed."""
