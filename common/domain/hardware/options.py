# SPDX-License-Identifier: Apache-2.0
"""The other hardware options of a guest, PCI devices, and unsupported options. Pure.

``OPTIONS`` has one row per option. The keys and values are the interface to the drivers.
docs/flavors.md lists them. A flavor names PCI devices by aliases that only the API's configuration
defines. The API resolves aliases when it freezes the flavor into a server (``with_aliases``), under
a key that is hidden from users. All other code reads the resolved form.

Options of Nova that hosts do not provide are refused instead of ignored. ``SPECS`` and ``IMAGES``
map the name of each to the values that request nothing.

Invariant: a key is present only if a flavor or an image requested it, and drivers support each of
its values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.domain.hardware.specs import (
    FALSE,
    DeviceRequest,
    HardwareSpecs,
    one_of,
    refusal,
    truth,
    whole,
)
from common.domain.models import Flavor

# The limit of a tap device.
_MAX_QUEUES = 256
_MAX_VIDEO_MB = 1024


@dataclass(frozen=True, slots=True)
class Option:
    """An option with the names of the extra spec and image property.

    ``parse`` returns the value, or "" if the text requests nothing.
    """

    key: str
    parse: Callable[[str], str]
    spec: str = ""
    image: str = ""


def _number(least: int, most: int) -> Callable[[str], str]:
    """Return a parser that accepts a number in this range, and returns the number as text.

    The parser returns "" for 0, which requests nothing, and raises ValueError for other texts.
    """

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
    """Return a parser that returns "" for this word, which every guest has.

    The parser raises ValueError for other words.
    """

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


_DISK = tuple(
    Option(f"disk_{limit}_sec", _number(1, 10**15), f"quota:disk_{limit}_sec")
    for limit in (
        "read_bytes",
        "write_bytes",
        "total_bytes",
        "read_iops",
        "write_iops",
        "total_iops",
    )
)
_VIF = tuple(
    Option(f"vif_{direction}_{limit}", _number(1, 2**32 - 1), f"quota:vif_{direction}_{limit}")
    for direction in ("inbound", "outbound")
    for limit in ("average", "peak", "burst")
)
OPTIONS = (
    Option("cpu_shares", _number(2, 262144), "quota:cpu_shares"),
    Option("cpu_period", _number(1000, 1000000), "quota:cpu_period"),
    Option("cpu_quota", _number(1000, 2**44), "quota:cpu_quota"),
    *_DISK,
    *_VIF,
    Option("rng", _only_no, "hw_rng:allowed"),
    Option("rng_bytes", _number(1, 2**31 - 1), "hw_rng:rate_bytes"),
    Option("rng_period", _number(1, 2**31 - 1), "hw_rng:rate_period"),
    Option("", _only("virtio"), "", "hw_rng_model"),
    Option("boot_menu", _yes_no, "hw:boot_menu", "hw_boot_menu"),
    Option("hide_hypervisor", _only_yes, "hw:hide_hypervisor_id", "img_hide_hypervisor_id"),
    Option("hide_hypervisor", _only_yes, "hide_hypervisor_id"),
    Option("pmu", _yes_no, "hw:pmu", "hw_pmu"),
    Option("hpet", _yes_no, "", "hw_time_hpet"),
    Option("vif_queues", _only_yes, "hw:vif_multiqueue_enabled", "hw_vif_multiqueue_enabled"),
    Option(
        "video_model",
        one_of("vga", "cirrus", "qxl", "virtio", "bochs", "none"),
        "",
        "hw_video_model",
    ),
    Option("video_ram_mb", _number(1, _MAX_VIDEO_MB), "", "hw_video_ram"),
    Option("disk_bus", one_of("virtio", "scsi", "sata", "ide", "usb"), "", "hw_disk_bus"),
    Option("cdrom_bus", one_of("ide", "sata", "scsi", "usb"), "", "hw_cdrom_bus"),
    Option("scsi_model", one_of("virtio-scsi", "lsilogic"), "", "hw_scsi_model"),
    Option(
        "vif_model",
        one_of("virtio", "e1000", "e1000e", "rtl8139", "ne2k_pci", "pcnet", "vmxnet3"),
        "",
        "hw_vif_model",
    ),
    Option("machine_type", one_of("pc", "q35"), "", "hw_machine_type"),
    Option("pointer_model", one_of("usbtablet", "ps2mouse"), "", "hw_pointer_model"),
    Option("guest_agent", _yes_no, "", "hw_qemu_guest_agent"),
    Option("require_quiesce", _only_yes, "", "os_require_quiesce"),
    Option("os_type", _word, "", "os_type"),
    Option(
        "pci_policy",
        one_of("preferred", "legacy", "required"),
        "hw:pci_numa_affinity_policy",
        "hw_pci_numa_affinity_policy",
    ),
    Option("", _only("1"), "hw:serial_port_count", "hw_serial_port_count"),
)
WATCHDOG = _unless("disabled", "none", "pause", "poweroff", "reset")


def options(requested: HardwareSpecs) -> dict[str, str]:
    """Return the requested options as key -> value, for ``Hardware.options``.

    Options that are not requested are left out, and so are the limits of a forbidden random number
    generator and the queues of a guest with one CPU. ``rng_bytes`` comes with ``rng_period``.

    Raises:
        BadRequest: A value is invalid, values contradict each other, or the image requests more
            video memory than the flavor allows.
    """
    values: dict[str, str] = {}
    for option in OPTIONS:
        value = requested.combine(option.spec, option.image, option.parse)
        if value and option.key:
            values[option.key] = value
    flavors, images = (
        requested.spec("hw:watchdog_action", WATCHDOG),
        requested.image("hw_watchdog_action", WATCHDOG),
    )
    action = (
        flavors if images is None else images
    )  # The image takes precedence for this option, as in Nova.
    if action:
        values["watchdog_action"] = action
    _check_limits(values)
    _check_rng(values, requested)
    _check_machine(values)
    _check_video(values, requested)
    _set_queues(values, requested)
    return values


def _check_limits(values: dict[str, str]) -> None:
    for unit in ("bytes", "iops"):
        for direction in ("read", "write"):
            if f"disk_total_{unit}_sec" in values and f"disk_{direction}_{unit}_sec" in values:
                raise refusal(
                    f"quota:disk_total_{unit}_sec",
                    f"cannot be combined with quota:disk_{direction}_{unit}_sec; limit either the total or each way.",
                )
    for direction in ("inbound", "outbound"):
        for unit in ("peak", "burst"):
            if f"vif_{direction}_{unit}" in values and f"vif_{direction}_average" not in values:
                raise refusal(
                    f"quota:vif_{direction}_{unit}",
                    f"only allowed with quota:vif_{direction}_average.",
                )


def _check_rng(values: dict[str, str], requested: HardwareSpecs) -> None:
    if "rng_period" in values and "rng_bytes" not in values:
        raise refusal("hw_rng:rate_period", "only allowed with hw_rng:rate_bytes.")
    if "rng_bytes" in values:
        values.setdefault("rng_period", "1000")
    if "rng" in values:
        if "hw_rng_model" in requested.properties:
            raise refusal(
                "hw_rng_model", "the flavor's hw_rng:allowed forbids a random number generator."
            )
        values.pop("rng_bytes", None)
        values.pop("rng_period", None)


def _check_machine(values: dict[str, str]) -> None:
    for bus in ("disk_bus", "cdrom_bus"):
        if values.get(bus) == "ide" and values.get("machine_type") == "q35":
            raise refusal(f"hw_{bus}", "hw_machine_type=q35 has no ide; use sata.")
    if "require_quiesce" in values and values.get("guest_agent") == "no":
        raise refusal(
            "os_require_quiesce",
            "needs the guest agent, which hw_qemu_guest_agent excludes.",
        )


def _check_video(values: dict[str, str], requested: HardwareSpecs) -> None:
    most = requested.spec("hw_video:ram_max_mb", whole()) or 0
    if "video_ram_mb" in values and values.get("video_model") in ("virtio", "none"):
        raise refusal(
            "hw_video_ram", f"hw_video_model={values['video_model']} has no memory of its own."
        )
    if "video_ram_mb" in values and int(values["video_ram_mb"]) > most:
        raise refusal(
            "hw_video_ram",
            f"at most {most} MiB, the flavor's hw_video:ram_max_mb; without that extra spec an "
            "image cannot choose.",
        )


def _set_queues(values: dict[str, str], requested: HardwareSpecs) -> None:
    if values.pop("vif_queues", None) is None:
        return
    if values.get("vif_model", "virtio") != "virtio":
        raise refusal(
            "hw_vif_multiqueue_enabled",
            f"interfaces of model {values['vif_model']} have one queue; use hw_vif_model=virtio.",
        )
    if requested.flavor.vcpus > 1:
        values["vif_queues"] = str(min(requested.flavor.vcpus, _MAX_QUEUES))


# --- PCI devices ---
ALIAS = "pci_passthrough:alias"
#: The prefix of extra specs that only Kilonova writes.
OWN = "kilonova:"
RESOLVED = OWN + "devices"
#: The limit of devices of one guest.
MAX_DEVICES = 64
_ALIAS_COUNT = re.compile(r"\s*([^\s:=|,]{1,255}):([0-9]{1,4})\s*", re.ASCII)
_ANSWER = re.compile(r"([^:=|,]+)=([0-9a-f:|]+):([0-9]{1,4})", re.ASCII)


def requests(text: str) -> list[tuple[str, int]]:
    """Parse the extra spec of PCI devices, ``name:count,...``, into pairs of alias and count.

    Raises:
        ValueError: The text is malformed, or requests too many devices.
    """
    matches = [_ALIAS_COUNT.fullmatch(part) for part in text.split(",")]
    pairs = [(match[1], int(match[2])) for match in matches if match]
    counts = [count for _, count in pairs]
    if len(pairs) != len(matches) or not all(counts) or sum(counts) > MAX_DEVICES:
        raise ValueError(
            "must be name:count, or several of these separated by commas, for at most "
            f"{MAX_DEVICES} devices"
        )
    return pairs


def with_aliases(flavor: Flavor, aliases: Mapping[str, Sequence[tuple[str, str]]]) -> Flavor:
    """Return the flavor for freezing into a server, with its PCI aliases resolved.

    Args:
        flavor: The flavor of the request. Its extra specs with the prefix ``OWN`` are dropped.
        aliases: Name -> the (vendor, product) kinds of devices of the alias.

    Raises:
        BadRequest: The extra spec with the aliases is malformed, or an alias is not configured.
    """
    specs = {key: value for key, value in flavor.extra_specs.items() if not key.startswith(OWN)}
    resolved = []
    for name, count in HardwareSpecs(flavor, {}).spec(ALIAS, requests) or ():
        if name not in aliases:
            raise refusal(ALIAS, f"{name[:80]!r} is not an alias in [api] pci_alias.")
        kinds = "|".join(sorted({f"{vendor}:{product}" for vendor, product in aliases[name]}))
        resolved.append(f"{name}={kinds}:{count}")
    if resolved:
        specs[RESOLVED] = ",".join(resolved)
    return dataclasses.replace(flavor, extra_specs=specs)


def devices(requested: HardwareSpecs) -> tuple[DeviceRequest, ...]:
    """Return the PCI devices that a frozen flavor requests.

    Raises:
        BadRequest: The aliases of the flavor are not resolved, or the resolved form is malformed.
    """
    if ALIAS in requested.specs and RESOLVED not in requested.specs:
        raise refusal(
            ALIAS, "its aliases are not resolved; set [api] pci_alias and use the flavor again."
        )
    return tuple(_request(part) for part in requested.specs.get(RESOLVED, "").split(",") if part)


def _request(text: str) -> DeviceRequest:
    match = _ANSWER.fullmatch(text)
    if match is None:
        raise refusal(
            ALIAS, "its resolved devices cannot be read; resize the server to the flavor again."
        )
    kinds = tuple(
        (vendor, product)
        for vendor, _, product in (kind.partition(":") for kind in match[2].split("|"))
    )
    return DeviceRequest(match[1], int(match[3]), kinds)


# --- hardware that is refused ---
_NO, _NEVER = FALSE, frozenset[str]()
_NONE, _ZERO = frozenset(("none", "disabled", "")), frozenset(("0",))

SPECS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "hw:mem_encryption",
            "hw:cpu_realtime",
            "hw:locked_memory",
            "hw:virtio_packed_ring",
            "hw:ephemeral_encryption",
        ),
        _NO,
    ),
    **dict.fromkeys(
        (
            "hw:mem_encryption_model",
            "hw:pmem",
            "hw:tpm_model",
            "hw:tpm_version",
            "hw:tpm_secret_security",
            "hw:cpu_realtime_mask",
            "hw:emulator_threads_policy",
            "hw:viommu_model",
            "hw:maxphysaddr_mode",
            "hw:maxphysaddr_bits",
            "hw:sound_model",
            "hw:usb_model",
            "hw:ephemeral_encryption_format",
            "accel:device_profile",
        ),
        _NEVER,
    ),
    "hw:redirected_usb_ports": _ZERO,
    "os:secure_boot": _NONE,
    **dict.fromkeys(
        (
            f"quota:{resource}_{limit}"
            for resource in ("cpu", "memory", "disk_io", "vif")
            for limit in ("limit", "reservation", "shares_level", "shares_share")
        ),
        _NEVER,
    ),
}
IMAGES: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            "hw_mem_encryption",
            "hw_locked_memory",
            "hw_virtio_packed_ring",
            "hw_firmware_stateless",
            "hw_ephemeral_encryption",
            "hw_ipxe_boot",
            "ipxe_boot",
        ),
        _NO,
    ),
    **dict.fromkeys(
        (
            "hw_mem_encryption_model",
            "hw_tpm_model",
            "hw_tpm_version",
            "hw_tpm_secret_security",
            "hw_cpu_realtime_mask",
            "hw_maxphysaddr_mode",
            "hw_maxphysaddr_bits",
            "hw_usb_model",
            "hw_input_bus",
            "hw_sound_model",
            "hw_ephemeral_encryption_format",
            "hw_ephemeral_encryption_secret_uuid",
        ),
        _NEVER,
    ),
    **dict.fromkeys(
        (
            "hw_viommu_model",
            "hw_emulation_architecture",
            "kernel_id",
            "ramdisk_id",
            "os_command_line",
        ),
        _NONE,
    ),
    "hw_redirected_usb_ports": _ZERO,
    "mappings": frozenset(("", "[]")),
    "os_secure_boot": _NONE | {"optional"},
    "hw_firmware_type": frozenset(("bios",)),
}
#: Namespaces of hardware. Unknown names in these are refused.
NAMESPACES = (
    "hw:",
    "hw_rng:",
    "hw_video:",
    "quota:",
    "os:",
    "accel:",
    "pci_passthrough:",
    "vmware:",
)
READ = frozenset(
    (
        *(option.spec for option in OPTIONS),
        "hw:watchdog_action",
        "hw_video:ram_max_mb",
        ALIAS,
        "hw:cpu_policy",
        "hw:cpu_dedicated_mask",
        "hw:cpu_thread_policy",
        "hw:numa_nodes",
        "hw:mem_page_size",
        *(
            f"hw:cpu_{limit}{kind}"
            for limit in ("", "max_")
            for kind in ("sockets", "cores", "threads")
        ),
    )
)
_GROUPED = re.compile("(resources|trait)[a-zA-Z0-9_-]{1,64}:|group_policy$")
_NUMBERED = re.compile("hw:numa_(cpus|mem)[.]")


def check(requested: HardwareSpecs) -> None:
    """Refuse hardware that hosts do not provide, and unknown extra specs in ``NAMESPACES``.

    The values of supported options are not checked.

    Raises:
        BadRequest: The text names the first such extra spec or image property.
    """
    for name, value in requested.specs.items():
        if name in SPECS:
            _refuse(name, value, SPECS[name])
        elif _GROUPED.match(name):
            raise refusal(
                name,
                "hosts of this cloud provide all resources of a server from one provider; use "
                "resources: and trait: without a group.",
            )
        elif name.startswith(NAMESPACES) and name not in READ and not _NUMBERED.match(name):
            raise refusal(name, "hosts of this cloud do not support this extra spec.")
    for name in sorted(IMAGES.keys() & requested.properties.keys()):
        _refuse(name, requested.properties[name], IMAGES[name])


def _refuse(name: str, value: str, nothing: frozenset[str]) -> None:
    if str(value).strip().lower() not in nothing:
        raise refusal(name, f"hosts of this cloud do not support {str(value)[:80]!r}.")
