# SPDX-License-Identifier: Apache-2.0
"""What the network service refuses, in Neutron's words: clients decide by the type's name, so each
has one line here.

`fault("PortNotFound", id=key)` makes the error to raise; `write_error` gives every error, falcon's
own too, the shape {"NeutronError": {"type", "message", "detail"}}.
"""

import falcon

from deploy.standalone.web import answer

#: type -> (status, message)
FAULTS = {
    "HTTPBadRequest": (400, "{why}"),
    "BadRequest": (400, "Bad {what} request: {why}"),
    "InvalidInput": (400, "Invalid input for operation: {why}."),
    "InvalidIpForSubnet": (
        400,
        "IP address {ip} is not a valid IP for the specified subnet {subnet}.",
    ),
    "InvalidIpForNetwork": (
        400,
        "IP address {ip} is not a valid IP for any of the subnets on network {id}.",
    ),
    "InvalidAllocationPool": (400, "The allocation pool {pool} is not valid."),
    "OutOfBoundsAllocationPool": (
        400,
        "The allocation pool {pool} spans beyond the subnet cidr {cidr}.",
    ),
    "OverlappingAllocationPools": (
        409,
        "Found overlapping allocation pools: {one} {other} for subnet {cidr}.",
    ),
    "GatewayConflictWithAllocationPools": (
        409,
        "Gateway ip {ip} conflicts with allocation pool {pool}.",
    ),
    "GatewayIpInUse": (
        409,
        "Current gateway ip {ip} already in use by port {port}. Unable to update.",
    ),
    "SecurityGroupInvalidPortRange": (
        400,
        "For TCP/UDP protocols, port_range_min must be <= port_range_max.",
    ),
    "SecurityGroupInvalidPortValue": (400, "Invalid value for port {port}."),
    "SecurityGroupMissingIcmpType": (
        400,
        "ICMP code (port-range-max) {value} is provided but ICMP type (port-range-min) is missing.",
    ),
    "SecurityGroupInvalidIcmpValue": (
        400,
        "Invalid value for ICMP {field} ({attr}) {value}. It must be 0 to 255.",
    ),
    "SecurityGroupInvalidProtocolForPort": (
        400,
        "Ports cannot be specified for protocol {protocol}. Ports are only"
        " supported for tcp, udp, sctp, dccp and udplite.",
    ),
    "SecurityGroupProtocolRequiredWithPorts": (
        400,
        "Must also specify protocol if port range is given.",
    ),
    "SecurityGroupRemoteGroupAndRemoteIpPrefix": (
        400,
        "Only remote_ip_prefix or remote_group_id may be provided.",
    ),
    "SecurityGroupRuleParameterConflict": (
        400,
        "Conflicting value ethertype {ethertype} for CIDR {cidr}.",
    ),
    "SecurityGroupEthertypeConflictWithProtocol": (
        400,
        "Invalid ethertype {ethertype} for protocol {protocol}.",
    ),
    "InvalidRoutes": (400, "Invalid format for routes: {why}."),
    "PolicyNotAuthorized": (403, "{rule} is disallowed by policy."),
    "NetworkNotFound": (404, "Network {id} could not be found."),
    "SubnetNotFound": (404, "Subnet {id} could not be found."),
    "PortNotFound": (404, "Port {id} could not be found."),
    "SecurityGroupNotFound": (404, "Security group {id} does not exist."),
    "SecurityGroupRuleNotFound": (404, "Security group rule {id} does not exist."),
    "RouterNotFound": (404, "Router {id} could not be found."),
    "RouterInterfaceNotFound": (404, "Router {id} does not have an interface with id {port}."),
    "RouterInterfaceNotFoundForSubnet": (404, "Router {id} has no interface on subnet {subnet}."),
    "FloatingIPNotFound": (404, "Floating IP {id} could not be found."),
    "ExternalGatewayForFloatingIPNotFound": (
        404,
        "External network {network} is not reachable from subnet {subnet}."
        " Therefore, cannot associate Port {port} with a Floating IP.",
    ),
    "ExtensionNotFound": (404, "Extension with alias {id} does not exist."),
    "AgentNotFound": (404, "Agent {id} could not be found."),
    "PortBindingNotFound": (404, "Binding for port {id} for host {host} could not be found."),
    "TagNotFound": (404, "Tag {id} could not be found."),
    "HostNotFound": (404, "Host {id} has never asked for its description."),
    "NetworkInUse": (
        409,
        "Unable to complete operation on network {id}."
        " There are one or more ports still in use on the network, id for these ports is {ports}.",
    ),
    "SubnetInUse": (409, "Unable to complete operation on subnet {id}: {why}."),
    "IpAddressInUse": (
        409,
        "Unable to complete operation for network {network}. The IP address {ip} is in use.",
    ),
    "IpAddressGenerationFailure": (409, "No more IP addresses available on network {network}."),
    "MacAddressInUse": (
        409,
        "Unable to complete operation for network {network}. The mac address {mac} is in use.",
    ),
    "PortInUse": (
        409,
        "Unable to complete operation on port {id} for network {network}. Port already has an attached"
        " device {device}.",
    ),
    "PortBindingAlreadyExists": (409, "Binding for port {id} on host {host} already exists."),
    "PortBindingAlreadyActive": (409, "Binding for port {id} on host {host} is already active."),
    "PortBindingInUse": (
        409,
        "Binding for port {id} on host {host} is the active one: activate another before it is"
        " deleted, or unbind the port.",
    ),
    "ServicePortInUse": (409, "Port {id} cannot be deleted directly via the port API: {why}."),
    "PortSecurityPortHasSecurityGroup": (
        409,
        "Port has security group associated. Cannot disable port security or ip"
        " address until security group is removed.",
    ),
    "AddressPairAndPortSecurityRequired": (
        409,
        "Port Security must be enabled in order to have allowed address pairs on a port.",
    ),
    "PortSecurityAndIPRequiredForSecurityGroups": (
        409,
        "Port security must be enabled in order to use security groups.",
    ),
    "SecurityGroupInUse": (409, "Security Group {id} in use."),
    "SecurityGroupCannotRemoveDefault": (
        409,
        "Insufficient rights for removing default security group.",
    ),
    "SecurityGroupDefaultAlreadyExists": (409, "Default security group already exists."),
    "SecurityGroupCannotUpdateDefault": (409, "Updating default security group not allowed."),
    "SecurityGroupRuleExists": (409, "Security group rule already exists. Rule id is {id}."),
    "RouterInUse": (409, "Router {id} still has ports."),
    "RouterInterfaceInUseByFloatingIP": (
        409,
        "Router interface for subnet {subnet} on router {id} cannot be deleted,"
        " as it is required by one or more floating IPs.",
    ),
    "RouterInterfaceInUseByRoute": (
        409,
        "Router interface for subnet {subnet} on router {id} cannot be deleted, as it"
        " is required by one or more routes.",
    ),
    "RouterExternalGatewayInUseByFloatingIp": (
        409,
        "Gateway cannot be updated for router {id}, since a gateway to"
        " external network {network} is required by one or more floating"
        " IPs.",
    ),
    "FloatingIPPortAlreadyAssociated": (
        409,
        "Cannot associate floating IP with port {port} using fixed IP {ip}, as"
        " that fixed IP already has a floating IP on external network {network}.",
    ),
    "ExternalNetworkInUse": (
        409,
        "External network {id} cannot be updated to be made non-external, since it has"
        " existing gateway ports.",
    ),
    "InvalidSharedSetting": (
        409,
        "Unable to reconfigure sharing settings for network {id}. Multiple tenants are using it.",
    ),
    "OverQuota": (409, "Quota exceeded for resources: ['{resource}']."),
    "PortBindingError": (
        500,
        "Binding for port {id} on host {host} could not be created or updated.",
    ),
}


class NeutronFault(falcon.HTTPError):
    """A refusal that names Neutron's type."""

    def __init__(self, kind: str, status: int, message: str) -> None:
        super().__init__(status, description=message)
        self.kind = kind


def fault(kind: str, **words: object) -> NeutronFault:
    """The error of this type; long words of the client's own are cut."""
    status, message = FAULTS[kind]
    return NeutronFault(
        kind, status, message.format(**{name: str(word)[:500] for name, word in words.items()})
    )


def write_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Give `error` the body that Neutron's clients read."""
    kind = error.kind if isinstance(error, NeutronFault) else type(error).__name__
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
