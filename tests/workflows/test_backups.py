# SPDX-License-Identifier: Apache-2.0
"""Tests of the rotation of backups, also when the image service refuses to delete an image."""

from __future__ import annotations

from typing import Any

import pytest

from common.domain import errors
from common.store.servers import actions
from tests.workflows.scenarios import ARGS, ask, trial_of
from tests.workflows.simulator import Cloud

IMAGE_IS_PROTECTED = errors.Forbidden("Image is protected and cannot be deleted.")


def read_last_action(cloud: Cloud, server: str) -> Any:
    return cloud.store.read(lambda tx: actions.list_for(tx, server))[0]


def create_backup(cloud: Cloud, server: str, number: int, rotation: int = 1) -> str:
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
def backups(cloud: Cloud) -> tuple[str, str, str]:
    """Return the ids of a server, the protected old backup image, and the new backup image."""
    server = trial_of(cloud, "backup").server
    old_image = create_backup(cloud, server, 1)
    cloud.images.refusing["delete", old_image] = IMAGE_IS_PROTECTED
    new_image = create_backup(cloud, server, 2)
    assert (read_last_action(cloud, server).state, read_last_action(cloud, server).message) == (
        "done",
        IMAGE_IS_PROTECTED.text,
    )
    assert cloud.pending() == [("backups", server)]
    return server, old_image, new_image


def test_pending_backup_rotation_deletes_old_image_once_unprotected(
    cloud: Cloud, backups: tuple[str, str, str]
) -> None:
    cloud.images.well()
    cloud.clean_up()
    assert list(cloud.images.records) == [backups[2]]


def test_pending_rotation_keeps_old_backup_after_user_deleted_newer_backup(
    cloud: Cloud, backups: tuple[str, str, str]
) -> None:
    cloud.images.well()
    cloud.images.delete(backups[2])
    cloud.clean_up()
    assert list(cloud.images.records) == [backups[1]]


def test_pending_backup_rotation_uses_rotation_of_latest_backup(
    cloud: Cloud, backups: tuple[str, str, str]
) -> None:
    newest = create_backup(cloud, backups[0], 3, rotation=5)
    assert cloud.pending() == []
    cloud.images.well()
    cloud.clean_up()
    assert sorted(cloud.images.records) == [backups[1], backups[2], newest]


def test_pending_backup_rotation_keeps_backups_of_deleted_server(
    cloud: Cloud, backups: tuple[str, str, str]
) -> None:
    ask(cloud, backups[0], "delete")
    cloud.settle()
    cloud.images.well()
    cloud.clean_up()
    assert sorted(cloud.images.records) == [backups[1], backups[2]]


def test_backup_rotation_counts_active_backups_only(cloud: Cloud) -> None:
    server = trial_of(cloud, "backup").server
    images = [create_backup(cloud, server, number, rotation=9) for number in range(4)]
    cloud.images.records[images[2]]["status"] = "queued"
    newest = create_backup(cloud, server, 4, rotation=2)
    assert sorted(cloud.images.records) == [*images[2:], newest]


def test_backup_rotation_counts_images_without_action_as_oldest(cloud: Cloud) -> None:
    """For example, a user copied the image, or the action was purged."""
    server = trial_of(cloud, "backup").server
    first = create_backup(cloud, server, 1)
    copy = "99999999-0000-4000-8000-000000000000"
    cloud.images.records[copy] = {**cloud.images.records[first], "id": copy, "number": 50}
    second = create_backup(cloud, server, 2, rotation=2)
    assert sorted(cloud.images.records) == [first, second]
