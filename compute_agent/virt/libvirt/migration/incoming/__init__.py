# SPDX-License-Identifier: Apache-2.0
"""Guests that come from other hosts while they run: what the libvirtd of such a host may say to
this host's.

``records`` keeps which guests are expected and from which host, and starts the proxy while there
are any. ``proxy`` is that process: it listens, has the other host prove itself, and passes on to
the local libvirtd what ``filter`` has made of its calls, with the domain of ``description`` in
them. ``rpc`` is the format of libvirt's calls, ``question`` asks another host's proxy whether a
guest has arrived.
"""
