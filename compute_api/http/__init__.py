# SPDX-License-Identifier: Apache-2.0
"""HTTP code that all services of ``compute_api`` share: requests, responses, policy and workers."""
