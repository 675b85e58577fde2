# SPDX-License-Identifier: Apache-2.0
"""``./deploy/down [--purge]``: stop the cloud of ./deploy/up.

--purge also removes the data. The guests end with the cloud. Installed packages stay.
"""

from __future__ import annotations

import sys

from deploy.one_machine.cloud import lifecycle
from deploy.one_machine.cloud.cloud import Cloud
from deploy.progress import Failure, main, say


def command(arguments: list[str]) -> int:
    """Stop the cloud that the environment variables describe, and return the exit status 0.

    Args:
        arguments: [], or ["--purge"] to remove the cloud's home too.

    Raises:
        Failure: The arguments are unknown, a variable is invalid, the cloud does not stop, or the
            home is not that of a cloud.
    """
    if arguments not in ([], ["--purge"]):
        raise Failure(
            f"Unknown arguments: {' '.join(arguments)}",
            "Run ./deploy/down, or ./deploy/down --purge.",
        )
    cloud = Cloud.from_environment()
    say(f"Stopping the cloud in {cloud.home} …")
    say("stopped" if lifecycle.shut_down(cloud) else "nothing runs")
    if arguments and cloud.home.exists():
        lifecycle.purge(cloud)
        say(f"{cloud.home} removed")
    elif cloud.home.exists():
        say(f"The data in {cloud.home} stay. Remove them with ./deploy/down --purge")
    return 0


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
