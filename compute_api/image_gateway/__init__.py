# SPDX-License-Identifier: Apache-2.0
"""The image gateway: the part of the image API that hosts use, with tickets."""
