# SPDX-License-Identifier: Apache-2.0
"""What the HTTP services share: connections, authentication, versions, schemas, policy, faults
(decision 0001)."""
