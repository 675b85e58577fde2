# SPDX-License-Identifier: Apache-2.0
"""The keys with which hosts authenticate to the network service.

The network and the metadata service share a secret, from which each host's key follows
(``proxy_headers.host_key``). The host signs its guests' metadata requests with this key. The host
derives another key for the network service.
"""

import hashlib
import hmac

HEADER = "X-Host-Key"


def wiring_key(key: str) -> str:
    """Return the key for the network service, derived from the host's key.

    The derived key cannot sign metadata requests.
    """
    return hmac.new(key.encode(), b"wiring", hashlib.sha256).hexdigest()
