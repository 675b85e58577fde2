# SPDX-License-Identifier: Apache-2.0
"""docs/pictures: the processes and their messages, and a server's life, drawn as SVG.

    python -m deploy.pictures        # writes docs/pictures/*.svg

Run by hand after a change here; a test compares the files with what this makes, the ways of a
server's life with ``common.states.ACTIONS``, and the steps of a create with the workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from deploy.packages import ROOT

FOLDER = ROOT / "docs/pictures"
LINE = 17  # pixels from one line of text to the next
PLAIN, TRUTH, FOREIGN = "#f4f6f8", "#fdf3d8", "#e6efe6"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with lines of text, the first of them bold; all numbers are pixels."""

    x: int
    y: int
    width: int
    height: int
    lines: tuple[str, ...]
    fill: str = PLAIN


@dataclass(frozen=True, slots=True)
class Arrow:
    """A line through points with its head at the last one, and words at a place."""

    points: tuple[tuple[int, int], ...]
    words: tuple[str, ...]
    at: tuple[int, int]
    both: bool = False  #: heads at both ends


PROCESSES = (
    Box(250, 10, 400, 46, ("tenants, operators", "openstack, SDKs, Terraform"), FOREIGN),
    Box(250, 110, 400, 62, ("kilonova-api", "checks, commits what was asked, answers")),
    Box(
        730, 110, 240, 62, ("Keystone, Glance, Neutron", "or the stand-ins of one machine"), FOREIGN
    ),
    Box(60, 260, 210, 62, ("database", "the truth"), TRUTH),
    Box(390, 260, 210, 62, ("RabbitMQ", "carries, knows nothing"), FOREIGN),
    Box(
        60,
        420,
        210,
        80,
        ("kilonova-conductor", "carries every action through", "its steps, each written first"),
    ),
    Box(390, 420, 210, 80, ("kilonova-scheduler", "proposes hosts")),
    Box(
        730,
        400,
        240,
        100,
        ("kilonova-agent", "one on each host,", "without database:", "drives libvirt"),
    ),
    Box(730, 260, 240, 62, ("kilonova-image-gateway", "images for hosts, by tickets")),
)
MESSAGES = (
    Arrow(((450, 56), (450, 110)), ("HTTP",), (460, 88)),
    Arrow(((650, 141), (730, 141)), ("HTTP",), (671, 134)),
    Arrow(((250, 141), (165, 141), (165, 260)), ("SQL",), (175, 205)),
    Arrow(((495, 172), (495, 260)), ("wakeup: there is", "something to do"), (505, 208)),
    Arrow(((165, 420), (165, 322)), ("SQL: steps,", "claims,", "journal"), (80, 352)),
    Arrow(((270, 435), (400, 322)), ("wakeups,", "questions"), (272, 358), both=True),
    Arrow(((495, 420), (495, 322)), ("proposals",), (505, 376), both=True),
    Arrow(((495, 500), (495, 530), (30, 530), (30, 291), (60, 291)), ("SQL: hosts, and what is there",), (160, 522)),
    Arrow(((600, 305), (670, 305), (670, 440), (730, 440)), ("commands,", "reports,", "sealed"), (678, 345), both=True),
    Arrow(((850, 400), (850, 322)), ("images",), (860, 366), both=True),
    Arrow(((850, 260), (850, 172)), ("images",), (860, 222), both=True),
)  # fmt: skip
#: The steps of ``conductor.workflows.create.CREATE``, and what each leaves.
STEPS = (
    ("volumes", "made, reserved"),
    ("image", "looked at again"),
    ("place", "host claimed"),
    ("networks", "ports made, bound"),
    ("connect_volumes", "host may connect"),
    ("build", "disks, domain, start"),
    ("plug", "ports are wired"),
    ("run", "it runs"),
)
#: vm_state -> where it is drawn: left and top.
STATES = {
    "active": (440, 270),
    "stopped": (440, 420),
    "paused": (60, 210),
    "suspended": (60, 290),
    "rescued": (60, 370),
    "resized": (820, 170),
    "shelved": (820, 300),
    "shelved_offloaded": (820, 400),
    "soft-delete": (820, 480),
    "deleted": (440, 530),
    "error": (60, 460),
}
#: From, to, the actions that are named there, the points between, where the words stand.
WAYS: tuple[tuple[str, str, tuple[str, ...], tuple[tuple[int, int], ...], tuple[int, int]], ...] = (
    ("active", "stopped", ("os-stop",), ((480, 312), (480, 420)), (420, 376)),
    ("stopped", "active", ("os-start",), ((560, 420), (560, 312)), (504, 370)),
    ("active", "paused", ("pause",), ((440, 280), (200, 222)), (330, 238)),
    ("paused", "active", ("unpause",), ((200, 240), (440, 290)), (222, 272)),
    ("active", "suspended", ("suspend",), ((440, 295), (200, 305)), (225, 298)),
    ("suspended", "active", ("resume",), ((200, 320), (440, 302)), (222, 334)),
    ("active", "rescued", ("rescue",), ((450, 312), (200, 384)), (250, 352)),
    ("rescued", "active", ("unrescue",), ((200, 400), (465, 312)), (222, 412)),
    ("active", "resized", ("resize", "migrate"), ((600, 280), (820, 182)), (600, 215)),
    ("resized", "active", ("confirmResize", "revertResize"), ((820, 205), (600, 290)), (730, 262)),
    ("active", "shelved", ("shelve",), ((600, 302), (820, 320)), (740, 308)),
    ("shelved", "shelved_offloaded", ("shelveOffload",), ((890, 342), (890, 400)), (896, 376)),
    ("shelved_offloaded", "active", ("unshelve",), ((820, 415), (580, 312)), (690, 352)),
    ("active", "soft-delete", ("softDelete",), ((570, 312), (820, 490)), (738, 424)),
    ("soft-delete", "active", ("restore",), ((820, 510), (540, 312)), (598, 425)),
    ("error", "active", ("rebuild", "evacuate"), ((200, 470), (500, 312)), (292, 450)),
)  # fmt: skip


def processes() -> str:
    """The processes, and what they say to each other."""
    return _picture(
        980,
        560,
        "The processes and their messages",
        [*map(_box, PROCESSES), *map(_arrow, MESSAGES)],
    )


def life() -> str:
    """A create, step by step; then the states that a server rests in."""
    boxes = [Box(20, 20, 150, 60, ("POST /servers", "one committed row"), TRUTH)]
    arrows = []
    for number, (step, leaves) in enumerate(STEPS):
        left = 190 + 141 * number
        boxes.append(Box(left, 20, 126, 60, (step, leaves)))
        arrows.append(Arrow(((left - (15 if number else 20), 50), (left, 50)), (), (0, 0)))
    boxes += [Box(left, top, 140, 42, (state,)) for state, (left, top) in STATES.items()]
    boxes[1 + len(STEPS)] = Box(*STATES["active"], 160, 42, ("active",), TRUTH)
    arrows.append(Arrow(((1240, 80), (1240, 130), (520, 130), (520, 270)), ("create",), (530, 180)))
    arrows += [Arrow(points, (", ".join(names),), at) for _, _, names, points, at in WAYS]
    said = (
        (20, 110, "Each step is in the journal before it begins; a failure undoes those before it."),
        (20, 128, "Steps that a server does not need are passed over: volumes, image, networks, plug, run."),
        (330, 600, "delete and forceDelete lead from every state to deleted. An action that fails leads back,"),
        (330, 618, "or to error when that is not sure. Not all ways are drawn: states.md has every one."),
    )  # fmt: skip
    words = [_text(left, top, text) for left, top, text in said]
    return _picture(1330, 630, "A server's life", [*map(_box, boxes), *map(_arrow, arrows), *words])


PICTURES: dict[str, Callable[[], str]] = {"processes.svg": processes, "life.svg": life}


def write() -> None:
    """All of them, where the pages look for them."""
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


def _picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="13">\n'
        f"<title>{escape(title)}</title>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="#456"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "".join(parts) + "</svg>\n"
    )


def _box(box: Box) -> str:
    middle = box.x + box.width // 2
    first = box.y + (box.height - LINE * len(box.lines)) // 2 + 13
    lines = (
        _text(middle, first + LINE * number, line, 'text-anchor="middle"' + ' font-weight="bold"' * (not number))
        for number, line in enumerate(box.lines)
    )  # fmt: skip
    return (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" '
        f'fill="{box.fill}" stroke="#456"/>\n' + "".join(lines)
    )


def _arrow(arrow: Arrow) -> str:
    points = " ".join(f"{x},{y}" for x, y in arrow.points)
    start = ' marker-start="url(#head)"' * arrow.both
    line = (
        f'<polyline points="{points}" fill="none" stroke="#456"{start} marker-end="url(#head)"/>\n'
    )
    return line + "".join(_words(arrow.at, arrow.words))


def _words(at: tuple[int, int], lines: Sequence[str]) -> Iterable[str]:
    for number, line in enumerate(lines):
        yield _text(at[0], at[1] + LINE * number, line)


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>\n'.replace(" >", ">")


if __name__ == "__main__":
    write()
