# SPDX-License-Identifier: Apache-2.0
"""The options of notifications, with Nova's names, and the settings of a process that writes them.

Driver, transport and topics are options of oslo.messaging: [oslo_messaging_notifications].
"""

from __future__ import annotations

from dataclasses import dataclass

from oslo_config import cfg

from common.notifications.periods import FORM, MONTH
from common.service.host_options import like

OFF, VERSIONED, UNVERSIONED, BOTH = "none", "versioned", "unversioned", "both"
VM_STATE, VM_AND_TASK_STATE = "vm_state", "vm_and_task_state"

OPTIONS = (
    cfg.StrOpt(
        "notification_format",
        default=OFF,
        choices=[OFF, VERSIONED, UNVERSIONED, BOTH],
        help="Format of the notifications about servers, services, aggregates, flavors and others, as Nova sends "
        "them through oslo.messaging. none: no notifications are written, at no cost. Must be the same for all "
        "processes. For transport and topics see [oslo_messaging_notifications].",
    ),
    cfg.StrOpt(
        "notify_on_state_change",
        default=OFF,
        choices=[OFF, VM_STATE, VM_AND_TASK_STATE],
        help="Changes of a server's state for which instance.update is sent.",
    ),
    cfg.ListOpt(
        "versioned_notifications_topics",
        default=["versioned_notifications"],
        help="Topics of versioned notifications.",
    ),
    cfg.IntOpt(
        "outbox_limit",
        default=100_000,
        min=100,
        help="Maximum number of notifications that wait while no broker accepts them. Beyond this number the oldest "
        "are dropped, with a warning.",
    ),
)


#: Options of [DEFAULT].
AUDIT = (
    cfg.BoolOpt(
        "instance_usage_audit",
        default=False,
        help="Whether instance.exists is sent at the end of a period for every server that ran in the period.",
    ),
    cfg.Opt(
        "instance_usage_audit_period",
        type=like(FORM, "month or day@18"),
        default=MONTH,
        help="The periods: hour, day, month or year, in UTC. day@18 begins at 18:00, month@15 on the 15th.",
    ),
)


@dataclass(frozen=True)
class NotificationSettings:
    """The settings of a process that writes notifications.

    ``host`` is the option ``[DEFAULT] host``. ``states`` and ``periods`` are the options
    notify_on_state_change and instance_usage_audit_period.
    """

    host: str
    states: str = OFF
    periods: str = MONTH

    @classmethod
    def of(cls, conf: cfg.ConfigOpts) -> NotificationSettings | None:
        """Return the settings, or None if notifications are off."""
        if conf.notifications.notification_format == OFF:
            return None
        return cls(
            conf.host, conf.notifications.notify_on_state_change, conf.instance_usage_audit_period
        )
