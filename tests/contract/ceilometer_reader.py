# SPDX-License-Identifier: Apache-2.0
"""Print the guests that Ceilometer's own discovery finds at a libvirtd, as a list in JSON.

Run by test_virt_telemetry.py with the Python of an environment that has Ceilometer:
``python ceilometer_reader.py URI``. The settings are Ceilometer's defaults. Nothing of ours is
imported here.
"""

import json
import sys

from ceilometer import service
from ceilometer.compute import discovery


def main(uri: str) -> None:
    """Print the guests."""
    conf = service.prepare_service([], config_files=[])
    conf.set_override("libvirt_uri", uri)
    found = discovery.InstanceDiscovery(conf).discover(None)
    json.dump([vars(guest) for guest in found], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
