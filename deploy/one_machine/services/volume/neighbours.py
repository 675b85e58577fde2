# SPDX-License-Identifier: Apache-2.0
"""The image and the compute service, as clients of the volume service.

Requests of a user are made with the user's token. Data are transferred with the service's own
token, because this may take longer than a user's token is valid.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

import requests
from keystoneauth1 import exceptions

from common.service.log import get_logger
from deploy.one_machine.services.database import DbValues
from deploy.one_machine.services.external import ComputeEvents, ExternalService, Later
from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.files import Check

LOG = get_logger("standalone.volume")
BLOCK = 1024 * 1024
#: The first microversion that shows the id of the attachment.
COMPUTE_VERSION = "2.89"


class ImageRefused(Exception):
    """The image or its data cannot be used, and another attempt would not help."""


class ImageNeighbour(ExternalService):
    """The image service (`service.ImageSource`), by Glance's API v2."""

    kind = "image"

    def _as_user(self, method: str, path: str, token: str, **options: object) -> requests.Response:
        try:
            return self._request(
                method, path, authenticated=False, headers={"X-Auth-Token": token}, **options
            )
        except Later as error:
            raise fault(
                "Unavailable", why=f"The request needs the image service: {error}; try again."
            ) from error

    def show(self, key: str, token: str) -> Body | None:
        response = self._as_user("GET", f"/v2/images/{key}", token)
        return response.json() if response.status_code == 200 else None

    def create(self, body: DbValues, token: str) -> Body:
        response = self._as_user("POST", "/v2/images", token, json=dict(body))
        if response.status_code != 201:
            why = f"The image service refuses the new image (status {response.status_code})."
            raise fault(
                "Forbidden" if response.status_code == 403 else "BadRequest", why=why, action=why
            )
        image: Body = response.json()
        return image

    def download(self, key: str, path: Path, limit: int, check: Check) -> None:
        response = self._request("GET", f"/v2/images/{key}/file", stream=True)
        with response:
            if response.status_code != 200:
                raise ImageRefused(f"image {key} cannot be read (status {response.status_code})")
            try:
                size = _write(response.iter_content(BLOCK), path, limit, check)
            except (requests.RequestException, exceptions.ClientException) as error:
                raise Later(
                    f"the download of image {key} broke off: {type(error).__name__}"
                ) from error
        announced = response.headers.get("Content-Length", "")
        if announced.isdecimal() and announced.lstrip("0") != str(size).lstrip("0"):
            raise Later(f"the download of image {key} broke off")

    def upload(self, key: str, path: Path, check: Check) -> bool:
        headers = {"Content-Type": "application/octet-stream"}
        with path.open("rb") as file:
            response = self._request(
                "PUT", f"/v2/images/{key}/file", data=_read(file, check), headers=headers
            )
        if response.status_code == 409:
            state = self._request("GET", f"/v2/images/{key}")
            if state.status_code == 200 and state.json()["status"] == "saving":
                raise Later(f"image {key} has the status saving after an upload that broke off")
            return state.status_code == 200 and bool(state.json()["status"] == "active")
        return response.status_code == 204

    def remove_unfinished(self, key: str) -> None:
        path = f"/v2/images/{key}"
        try:
            state = self._request("GET", path)
            if state.status_code != 200 or state.json()["status"] not in ("queued", "saving"):
                return
            status = self._request("DELETE", path).status_code
            if status not in (204, 404):
                LOG.warning("an image without data cannot be deleted", image=key, status=status)
        except Later as error:
            LOG.warning("an image without data cannot be deleted", image=key, problem=error)


def _write(blocks: Iterator[bytes], path: Path, limit: int, check: Check) -> int:
    size = 0
    with path.open("xb") as file:
        for block in blocks:
            check()
            size += len(block)
            if size > limit:
                raise ImageRefused(f"the image is larger than {limit} bytes")
            if block.count(0) == len(block):
                # A hole.
                file.seek(len(block), 1)
            else:
                file.write(block)
        file.truncate(size)
    return size


def _read(file: IO[bytes], check: Check) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        check()
        yield block


class ComputeNeighbour(ComputeEvents):
    """The compute service (`service.ComputeSource`), by Nova's API."""

    def attachment_of(self, server: str, volume: str) -> str | None:
        if not self._has_compute():
            return None
        try:
            response = self._request(
                "GET",
                f"/servers/{server}/os-volume_attachments/{volume}",
                headers={"OpenStack-API-Version": f"compute {COMPUTE_VERSION}"},
            )
        except Later as error:
            why = f"Cannot check whether server {server} uses volume {volume}: {error}; try again."
            raise fault("Unavailable", why=why) from error
        if response.status_code != 200:
            return None
        return str(response.json()["volumeAttachment"].get("attachment_id", ""))

    def _has_compute(self) -> bool:
        try:
            return bool(self.url())
        except exceptions.ClientException as error:
            why = "Cannot find the compute service, because the identity service does not answer; try again."
            raise fault("Unavailable", why=why) from error

    def notify(self, events: Collection[Mapping[str, str]]) -> bool:
        try:
            if not self.url():
                # Without a compute service there is nothing to notify.
                return True
        except exceptions.ClientException as error:
            LOG.warning(
                "events cannot be sent to the compute service and are sent again",
                count=len(events),
                problem=error,
            )
            return False
        return self.send_events(events)
