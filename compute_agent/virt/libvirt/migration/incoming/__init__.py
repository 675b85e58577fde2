# SPDX-License-Identifier: Apache-2.0
"""The proxy between the libvirtds of other hosts and this host's, for incoming live migrations.

``records`` stores which guests are expected from which hosts, and runs the proxy process while
there are any. ``proxy`` is that process. It authenticates the other host and forwards its calls to
the local libvirtd, as rewritten by ``filter`` with the domain from ``description``. ``rpc`` is the
wire format of libvirt's calls. ``question`` queries another host's proxy whether a guest has
arrived.
"""
