# SPDX-License-Identifier: Apache-2.0
"""How a host proves to the network service who it is.

The network service and the metadata service share a secret. Each host has a key that follows from
it (``asker.host_key``): with it the host signs what its guests ask of the metadata service, and
from it follows what it shows to the network service.
"""

import hashlib
import hmac

HEADER = "X-Host-Key"


def wiring_key(key: str) -> str:
    """What a host with this key shows to the network service; nothing can be signed with it."""
    return hmac.new(key.encode(), b"wiring", hashlib.sha256).hexdigest()
