# SPDX-License-Identifier: Apache-2.0
"""Nova as an oracle: what its own schemas say of requests and answers."""
