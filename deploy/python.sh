# SPDX-License-Identifier: Apache-2.0
# Read by deploy/up, down, lab and test: goes to the repository and sets $python to a Python 3.11, installing Debian's
# when there is none. Everything after this is Python.
cd "$(dirname "$0")/.." || exit 1
python=
for candidate in /usr/bin/python3.11 python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "Python 3.11 is missing. What to do: run this on Debian 12 as root, or install Python 3.11." >&2
        exit 1
    fi
    echo "Installing Python 3.11 …"
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
            python3 python3-venv; } > /dev/null; then
        echo "apt-get failed. What to do: check the network and /etc/apt/sources.list." >&2
        exit 1
    fi
    python=/usr/bin/python3.11
fi
