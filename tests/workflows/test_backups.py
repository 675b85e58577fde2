# SPDX-License-Identifier: Apache-2.0
"""Backups that the image service does not let go: the new one stays; which old ones go is counted
anew each time."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors
from common.store.servers import actions
from tests.workflows.scenarios import ARGS, ask, trial_of
from tests.workflows.simulator import Cloud

PROTECTED = errors.Forbidden("Image is protected and cannot be deleted.")


def last(cloud: Cloud, server: str) -> Any:
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


def backup(cloud: Cloud, server: str, number: int, rotation: int = 1) -> str:
    image = f"{number:08d}-0000-4000-8000-000000000000"
    cloud.ask(
        server,
        "createBackup",
        args={
            **ARGS["createBackup"],
            "image_id": image,
            "rotation": rotation,
            "properties": {"image_type": "backup", "backup_type": "daily", "instance_uuid": server},
        },
    )
    cloud.settle()
    assert cloud.images.records[image]["data"] is not None, "the new backup is lost"
    return image


@pytest.fixture
def kept(cloud: Cloud) -> tuple[str, str, str]:
    """A server, its old backup that is protected, and its new one."""
    server = trial_of(cloud, "backup").server
    old = backup(cloud, server, 1)
    cloud.images.refusing["delete", old] = PROTECTED
    new = backup(cloud, server, 2)
    assert (last(cloud, server).state, last(cloud, server).message) == ("done", PROTECTED.text)
    assert cloud.pending() == [("backups", server)]
    return server, old, new


def test_a_backup_that_cannot_go_costs_the_new_one_nothing(
    cloud: Cloud, kept: tuple[str, str, str]
) -> None:
    cloud.images.well()
    cloud.clean_up()
    assert list(cloud.images.records) == [kept[2]]


def test_an_old_backup_stays_when_it_is_the_last_one(
    cloud: Cloud, kept: tuple[str, str, str]
) -> None:
    """Its user has removed the new one meanwhile."""
    cloud.images.well()
    cloud.images.delete(kept[2])
    cloud.clean_up()
    assert list(cloud.images.records) == [kept[1]]


def test_the_rotation_that_was_asked_for_last_counts(
    cloud: Cloud, kept: tuple[str, str, str]
) -> None:
    newest = backup(cloud, kept[0], 3, rotation=5)
    assert cloud.pending() == []
    cloud.images.well()
    cloud.clean_up()
    assert sorted(cloud.images.records) == [kept[1], kept[2], newest]


def test_backups_of_a_deleted_server_are_left_alone(
    cloud: Cloud, kept: tuple[str, str, str]
) -> None:
    ask(cloud, kept[0], "delete")
    cloud.settle()
    cloud.images.well()
    cloud.clean_up()
    assert sorted(cloud.images.records) == [kept[1], kept[2]]


def test_backup_rotation_counts_active_backups_only(cloud: Cloud) -> None:
    server = trial_of(cloud, "backup").server
    images = [backup(cloud, server, number, rotation=9) for number in range(4)]
    cloud.images.records[images[2]]["status"] = "queued"
    newest = backup(cloud, server, 4, rotation=2)
    assert sorted(cloud.images.records) == [*images[2:], newest]


def test_backup_rotation_counts_images_without_action_as_oldest(cloud: Cloud) -> None:
    """Such an image is a copy that a user made, or its action was purged."""
    server = trial_of(cloud, "backup").server
    first = backup(cloud, server, 1)
    copy = "99999999-0000-4000-8000-000000000000"
    cloud.images.records[copy] = {**cloud.images.records[first], "id": copy, "number": 50}
    second = backup(cloud, server, 2, rotation=2)
    assert sorted(cloud.images.records) == [first, second]
