# SPDX-License-Identifier: Apache-2.0
"""Messages between processes: who answers what (agent, conductor, scheduler), and how they travel.

The threading backend of oslo.service must be chosen before oslo.messaging is imported, or eventlet
comes along.
"""

import sys

sys.modules.setdefault("eventlet", None)  # type: ignore[arg-type]  # futurist imports it wherever it finds it
from oslo_service import backend  # noqa: E402

backend.init_backend(backend.BackendType.THREADING)
