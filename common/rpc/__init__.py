# SPDX-License-Identifier: Apache-2.0
"""Messages between processes: interfaces of agent, conductor and scheduler, and their transport.

The threading backend of oslo.service must be chosen before oslo.messaging is imported. Otherwise
oslo.messaging loads eventlet.
"""

import sys

sys.modules.setdefault("eventlet", None)  # type: ignore[arg-type]  # futurist imports eventlet if it is installed
from oslo_service import backend  # noqa: E402 - eventlet must be blocked before this import

backend.init_backend(backend.BackendType.THREADING)
