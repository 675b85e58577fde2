# SPDX-License-Identifier: Apache-2.0
"""The proxy between the libvirtds of other hosts and this host's, for incoming live migrations.

``records`` stores which guests are expected from which hosts, and runs the proxy process while a
guest is expected. ``proxy`` is that process. The proxy authenticates the other host. ``filter``
rewrites each call for the local libvirtd, with the domain from ``description``. ``rpc`` is the wire
format of libvirt's calls. ``question`` queries another host's proxy whether a guest has arrived.
"""
