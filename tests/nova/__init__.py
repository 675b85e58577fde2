# SPDX-License-Identifier: Apache-2.0
"""Nova as an oracle: Nova's schemas judge the requests and answers of Kilonova."""
