"""Downloads the files of a model from the API, each compared with its SHA-256."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from services.cli.client import Client, CommandFailed
from services.shared.files.atomic_write import partial_path
from services.shared.files.hashing import file_sha256


def download_artifact(client: Client, model_id: str, directory: Path) -> int:
    """Write the artifact to `directory`, absent or empty, which appears complete; return its bytes.

    Raises CommandFailed, OSError.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CommandFailed(f"{directory} exists and is not empty: choose another directory.")
    staging = partial_path(directory)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        size_bytes = 0
        for file in client.get(f"/models/{model_id}/files")["items"]:
            name = file["name"]
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise CommandFailed(f"The server names a file {name!r} outside of the model.")
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download(f"/models/{model_id}/files/{quote(name)}", path)
            if file_sha256(path) != file["sha256"]:
                raise CommandFailed(f"{name} arrived damaged: repeat the command.")
            size_bytes += file["size_bytes"]
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return size_bytes
