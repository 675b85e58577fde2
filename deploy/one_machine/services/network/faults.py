# SPDX-License-Identifier: Apache-2.0
"""The errors of the network service, with Neutron's texts. Clients decide by the type's name.

`fault("PortNotFound", id=key)` returns the error to raise. `write_error` gives every error, also
falcon's own, the shape {"NeutronError": {"type", "message", "detail"}}.
"""

from collections.abc import Mapping

import falcon

from deploy.one_machine.services.faults import Fault, FaultTable
from deploy.one_machine.services.web import answer

#: Status -> type -> message.
FAULTS: Mapping[int, Mapping[str, str]] = {
    400: {
        "HTTPBadRequest": "{why}",
        "BadRequest": "Bad {what} request: {why}",
        "InvalidInput": "Invalid input for operation: {why}.",
        "InvalidIpForSubnet": "IP address {ip} is not a valid IP for the specified subnet {subnet}.",
        "InvalidIpForNetwork": "IP address {ip} is not a valid IP for any of the subnets on network {id}.",
        "InvalidAllocationPool": "The allocation pool {pool} is not valid.",
        "OutOfBoundsAllocationPool": "The allocation pool {pool} spans beyond the subnet cidr {cidr}.",
        "SecurityGroupInvalidPortRange": "For TCP/UDP protocols, port_range_min must be <= port_range_max.",
        "SecurityGroupInvalidPortValue": "Invalid value for port {port}.",
        "SecurityGroupMissingIcmpType": "ICMP code (port-range-max) {value} is provided but ICMP"
        " type (port-range-min) is missing.",
        "SecurityGroupInvalidIcmpValue": "Invalid value for ICMP {field} ({attr}) {value}. It must be 0 to 255.",
        "SecurityGroupInvalidProtocolForPort": "Ports cannot be specified for protocol {protocol}."
        " Ports are only supported for tcp, udp, sctp, dccp and udplite.",
        "SecurityGroupProtocolRequiredWithPorts": "Must also specify protocol if port range is given.",
        "SecurityGroupRemoteGroupAndRemoteIpPrefix": "Only remote_ip_prefix or remote_group_id may be provided.",
        "SecurityGroupRuleParameterConflict": "Conflicting value ethertype {ethertype} for CIDR {cidr}.",
        "SecurityGroupEthertypeConflictWithProtocol": "Invalid ethertype {ethertype} for protocol {protocol}.",
        "InvalidRoutes": "Invalid format for routes: {why}.",
    },
    403: {"PolicyNotAuthorized": "{rule} is disallowed by policy."},
    404: {
        "NetworkNotFound": "Network {id} could not be found.",
        "SubnetNotFound": "Subnet {id} could not be found.",
        "PortNotFound": "Port {id} could not be found.",
        "SecurityGroupNotFound": "Security group {id} does not exist.",
        "SecurityGroupRuleNotFound": "Security group rule {id} does not exist.",
        "RouterNotFound": "Router {id} could not be found.",
        "RouterInterfaceNotFound": "Router {id} does not have an interface with id {port}.",
        "RouterInterfaceNotFoundForSubnet": "Router {id} has no interface on subnet {subnet}.",
        "FloatingIPNotFound": "Floating IP {id} could not be found.",
        "ExternalGatewayForFloatingIPNotFound": "External network {network} is not reachable from"
        " subnet {subnet}. Therefore, cannot associate Port {port} with a Floating IP.",
        "ExtensionNotFound": "Extension with alias {id} does not exist.",
        "PortBindingNotFound": "Binding for port {id} for host {host} could not be found.",
        "HostNotFound": "Host {id} is unknown. A host becomes known when its network agent sends a request.",
    },
    409: {
        "OverlappingAllocationPools": "Found overlapping allocation pools: {one} {other} for subnet {cidr}.",
        "GatewayConflictWithAllocationPools": "Gateway ip {ip} conflicts with allocation pool {pool}.",
        "GatewayIpInUse": "Current gateway ip {ip} already in use by port {port}. Unable to update.",
        "NetworkInUse": "Unable to complete operation on network {id}. There are one or more ports"
        " still in use on the network, id for these ports is {ports}.",
        "SubnetInUse": "Unable to complete operation on subnet {id}: {why}.",
        "IpAddressInUse": "Unable to complete operation for network {network}. The IP address {ip} is in use.",
        "IpAddressGenerationFailure": "No more IP addresses available on network {network}.",
        "MacAddressInUse": "Unable to complete operation for network {network}. The mac address {mac} is in use.",
        "PortInUse": "Unable to complete operation on port {id} for network {network}. Port"
        " already has an attached device {device}.",
        "PortBindingAlreadyExists": "Binding for port {id} on host {host} already exists.",
        "PortBindingAlreadyActive": "Binding for port {id} on host {host} is already active.",
        "PortBindingInUse": "Binding for port {id} on host {host} is active. Activate another"
        " binding or unbind the port before you delete this binding.",
        "ServicePortInUse": "Port {id} cannot be deleted directly via the port API: {why}.",
        "AddressPairAndPortSecurityRequired": "Port Security must be enabled in order to have"
        " allowed address pairs on a port.",
        "PortSecurityAndIPRequiredForSecurityGroups": "Port security must be enabled in order to"
        " use security groups.",
        "SecurityGroupInUse": "Security Group {id} in use.",
        "SecurityGroupCannotRemoveDefault": "Insufficient rights for removing default security group.",
        "SecurityGroupDefaultAlreadyExists": "Default security group already exists.",
        "SecurityGroupCannotUpdateDefault": "Updating default security group not allowed.",
        "SecurityGroupRuleExists": "Security group rule already exists. Rule id is {id}.",
        "RouterInUse": "Router {id} still has ports.",
        "RouterInterfaceInUseByFloatingIP": "Router interface for subnet {subnet} on router {id}"
        " cannot be deleted, as it is required by one or more floating IPs.",
        "RouterInterfaceInUseByRoute": "Router interface for subnet {subnet} on router {id} cannot"
        " be deleted, as it is required by one or more routes.",
        "RouterExternalGatewayInUseByFloatingIp": "Gateway cannot be updated for router {id},"
        " since a gateway to external network {network} is required by one or more floating IPs.",
        "FloatingIPPortAlreadyAssociated": "Cannot associate floating IP with port {port} using"
        " fixed IP {ip}, as that fixed IP already has a floating IP on external network {network}.",
        "ExternalNetworkInUse": "External network {id} cannot be updated to be made non-external,"
        " since it has existing gateway ports.",
        "InvalidSharedSetting": "Unable to reconfigure sharing settings for network {id}. Multiple"
        " tenants are using it.",
        "OverQuota": "Quota exceeded for resources: ['{resource}'].",
    },
    500: {
        "PortBindingError": "Binding for port {id} on host {host} could not be created or updated."
    },
}


#: Return the error of a type. All words in braces need a value.
fault = FaultTable(FAULTS).fault


def bad_request(what: str, why: str) -> Fault:
    """Return the 400 error of a request about a router, port or floating IP.

    Args:
        what: The resource: "router", "port" or "floatingip".
        why: The reason.
    """
    return fault("BadRequest", what=what, why=why)


def invalid(why: str) -> Fault:
    """Return the 400 error for values that contradict each other or the present state."""
    return fault("InvalidInput", why=why)


def malformed(why: str) -> Fault:
    """Return the 400 error of a request with a wrong form."""
    return fault("HTTPBadRequest", why=why)


def write_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Set the body of an error response in Neutron's form: {"NeutronError": {"type", …}}."""
    kind = error.kind if isinstance(error, Fault) else type(error).__name__
    answer(
        resp,
        {
            "NeutronError": {
                "type": kind,
                "message": error.description or error.title or "",
                "detail": "",
            }
        },
    )
