# SPDX-License-Identifier: Apache-2.0
# deploy/up, down, lab, deb, docs, lock and test source this file. It changes to the repository, and sets $python to an
# interpreter of Python 3.11 to 3.13 that can create virtual environments. Without one, it installs Debian's.
cd "$(dirname "$0")/.." || exit 1
find_python() {
    for python in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
        "$python" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null && return
    done
    return 1
}
if ! find_python; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
        echo "No Python 3.11, 3.12 or 3.13 with venv was found. What to do: run this on Debian 12 or 13 as root," \
            "or install Python and its venv." >&2
        exit 1
    fi
    echo "Installing Python …"
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
            python3 python3-venv; } > /dev/null; then
        echo "apt-get failed. What to do: check the network and /etc/apt/sources.list." >&2
        exit 1
    fi
    if ! find_python; then
        echo "This release's Python is none of 3.11 to 3.13. What to do: run this on Debian 12 or 13." >&2
        exit 1
    fi
fi
