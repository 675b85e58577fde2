# SPDX-License-Identifier: Apache-2.0
"""The small things of a guest's hardware: one line in a table for each, and what excludes what.

Pure. The keys and their values are the interface to the drivers; docs/flavors.md lists them.
Must stay true: a key is there only when a flavor or an image asked for it, and drivers carry out each of its values.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.hardware.asked import Asked, refusal
from common.hardware.values import one_of, truth, whole

_MOST_QUEUES = 256          # of a tap device
_MOST_VIDEO_MB = 1024


@dataclass(frozen=True, slots=True)
class Option:
    """``parse`` gives the value, or "" for nothing asked."""

    key: str
    parse: Callable[[str], str]
    spec: str = ""
    image: str = ""


def _number(least: int, most: int) -> Callable[[str], str]:
    """A number in its range; 0: nothing asked."""
    def read(text: str) -> str:
        number = whole(0, most)(text)
        if 0 < number < least:
            raise ValueError(f"is less than {least}")
        return str(number) if number else ""
    return read


def _yes_no(text: str) -> str:
    return "yes" if truth(text) else "no"


def _only_yes(text: str) -> str:
    return "yes" if truth(text) else ""


def _only_no(text: str) -> str:
    return "" if truth(text) else "no"


def _only(word: str) -> Callable[[str], str]:
    """What every guest has, and nothing else to choose."""
    def read(text: str) -> str:
        one_of(word)(text)
        return ""
    return read


def _unless(nothing: str, *words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        word = one_of(*words, nothing)(text)
        return "" if word == nothing else word
    return read


def _word(text: str) -> str:
    word = text.strip().lower()
    if not word.isascii() or not word.isprintable() or len(word) > 64:
        raise ValueError("is not a word of at most 64 letters")
    return word


_DISK = tuple(Option(f"disk_{what}_sec", _number(1, 10 ** 15), f"quota:disk_{what}_sec") for what in (
    "read_bytes", "write_bytes", "total_bytes", "read_iops", "write_iops", "total_iops"))
_VIF = tuple(Option(f"vif_{way}_{what}", _number(1, 2 ** 32 - 1), f"quota:vif_{way}_{what}")
             for way in ("inbound", "outbound") for what in ("average", "peak", "burst"))
OPTIONS = (
    Option("cpu_shares", _number(2, 262144), "quota:cpu_shares"),
    Option("cpu_period", _number(1000, 1000000), "quota:cpu_period"),
    Option("cpu_quota", _number(1000, 2 ** 44), "quota:cpu_quota"),
    *_DISK, *_VIF,
    Option("rng", _only_no, "hw_rng:allowed"),
    Option("rng_bytes", _number(1, 2 ** 31 - 1), "hw_rng:rate_bytes"),
    Option("rng_period", _number(1, 2 ** 31 - 1), "hw_rng:rate_period"),
    Option("", _only("virtio"), "", "hw_rng_model"),
    Option("boot_menu", _yes_no, "hw:boot_menu", "hw_boot_menu"),
    Option("hide_hypervisor", _only_yes, "hw:hide_hypervisor_id", "img_hide_hypervisor_id"),
    Option("hide_hypervisor", _only_yes, "hide_hypervisor_id"),
    Option("pmu", _yes_no, "hw:pmu", "hw_pmu"),
    Option("hpet", _yes_no, "", "hw_time_hpet"),
    Option("vif_queues", _only_yes, "hw:vif_multiqueue_enabled", "hw_vif_multiqueue_enabled"),
    Option("video_model", one_of("vga", "cirrus", "qxl", "virtio", "bochs", "none"), "", "hw_video_model"),
    Option("video_ram_mb", _number(1, _MOST_VIDEO_MB), "", "hw_video_ram"),
    Option("disk_bus", one_of("virtio", "scsi", "sata", "ide", "usb"), "", "hw_disk_bus"),
    Option("cdrom_bus", one_of("ide", "sata", "scsi", "usb"), "", "hw_cdrom_bus"),
    Option("scsi_model", one_of("virtio-scsi", "lsilogic"), "", "hw_scsi_model"),
    Option("vif_model", one_of("virtio", "e1000", "e1000e", "rtl8139", "ne2k_pci", "pcnet", "vmxnet3"), "",
           "hw_vif_model"),
    Option("machine_type", one_of("pc", "q35"), "", "hw_machine_type"),
    Option("pointer_model", one_of("usbtablet", "ps2mouse"), "", "hw_pointer_model"),
    Option("guest_agent", _yes_no, "", "hw_qemu_guest_agent"),
    Option("require_quiesce", _only_yes, "", "os_require_quiesce"),
    Option("os_type", _word, "", "os_type"),
    Option("pci_policy", one_of("preferred", "legacy", "required"), "hw:pci_numa_affinity_policy",
           "hw_pci_numa_affinity_policy"),
    Option("", _only("1"), "hw:serial_port_count", "hw_serial_port_count"))
WATCHDOG = _unless("disabled", "none", "pause", "poweroff", "reset")


def options(asked: Asked) -> dict[str, str]:
    """``Hardware.options``. Raises BadRequest."""
    found: dict[str, str] = {}
    for option in OPTIONS:
        value = asked.agreed(option.spec, option.image, option.parse)
        if value and option.key:
            found[option.key] = value
    flavors, images = asked.spec("hw:watchdog_action", WATCHDOG), asked.image("hw_watchdog_action", WATCHDOG)
    action = flavors if images is None else images          # here the image decides, as in Nova
    if action:
        found["watchdog_action"] = action
    _check_limits(found)
    _check_rng(found, asked)
    _check_machine(found)
    _check_video(found, asked)
    _set_queues(found, asked)
    return found


def _check_limits(found: dict[str, str]) -> None:
    for what in ("bytes", "iops"):
        for way in ("read", "write"):
            if f"disk_total_{what}_sec" in found and f"disk_{way}_{what}_sec" in found:
                raise refusal(f"quota:disk_total_{what}_sec", f"not beside quota:disk_{way}_{what}_sec; limit either "
                                                              "the total or each way.")
    for way in ("inbound", "outbound"):
        for what in ("peak", "burst"):
            if f"vif_{way}_{what}" in found and f"vif_{way}_average" not in found:
                raise refusal(f"quota:vif_{way}_{what}", f"only beside quota:vif_{way}_average.")


def _check_rng(found: dict[str, str], asked: Asked) -> None:
    if "rng_period" in found and "rng_bytes" not in found:
        raise refusal("hw_rng:rate_period", "only beside hw_rng:rate_bytes.")
    if "rng_bytes" in found:
        found.setdefault("rng_period", "1000")
    if "rng" in found:
        if "hw_rng_model" in asked.properties:
            raise refusal("hw_rng_model", "the flavor's hw_rng:allowed gives the guest none.")
        found.pop("rng_bytes", None)
        found.pop("rng_period", None)


def _check_machine(found: dict[str, str]) -> None:
    for bus in ("disk_bus", "cdrom_bus"):
        if found.get(bus) == "ide" and found.get("machine_type") == "q35":
            raise refusal(f"hw_{bus}", "hw_machine_type=q35 has no ide; use sata.")
    if "require_quiesce" in found and found.get("guest_agent") == "no":
        raise refusal("os_require_quiesce", "needs the guest agent, and hw_qemu_guest_agent says there is none.")


def _check_video(found: dict[str, str], asked: Asked) -> None:
    most = asked.spec("hw_video:ram_max_mb", whole()) or 0
    if "video_ram_mb" in found and found.get("video_model") in ("virtio", "none"):
        raise refusal("hw_video_ram", f"hw_video_model={found['video_model']} has no memory of its own.")
    if "video_ram_mb" in found and int(found["video_ram_mb"]) > most:
        raise refusal("hw_video_ram", f"at most {most} MiB, as the flavor's hw_video:ram_max_mb says; without it an "
                                      "image cannot choose.")


def _set_queues(found: dict[str, str], asked: Asked) -> None:
    if found.pop("vif_queues", None) is None:
        return
    if found.get("vif_model", "virtio") != "virtio":
        raise refusal("hw_vif_multiqueue_enabled", f"interfaces of model {found['vif_model']} have one queue; use "
                                                   "hw_vif_model=virtio.")
    if asked.flavor.vcpus > 1:
        found["vif_queues"] = str(min(asked.flavor.vcpus, _MOST_QUEUES))
