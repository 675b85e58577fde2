# SPDX-License-Identifier: Apache-2.0
"""Print the guests that Ceilometer's own discovery finds at a libvirtd, as a JSON list.

test_virt_telemetry.py runs ``python ceilometer_reader.py URI`` with the Python of an environment
that has Ceilometer, at default settings. This file imports no code of Kilonova.
"""

import json
import sys

from ceilometer import service
from ceilometer.compute import discovery


def main(uri: str) -> None:
    conf = service.prepare_service([], config_files=[])
    conf.set_override("libvirt_uri", uri)
    guests = discovery.InstanceDiscovery(conf).discover(None)
    json.dump([vars(guest) for guest in guests], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
