"""The headers of all weight files, compared with the sizes of the files; no weight is read."""

from __future__ import annotations

from pathlib import Path

from services.shared.jobs.supply.directory import Refused, read_object
from services.shared.memory.architecture.safetensors_headers import INDEX, read_header

_MAX_SHARDS = 2000
_MAX_HEADER_BYTES = 32 * 2**20  # of all files: a tensor takes some hundred bytes


def check_weights(directory: Path) -> None:
    """Check every safetensors file and the index, if there is one. Raises Refused."""
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > _MAX_SHARDS:
        raise Refused(f"it has {len(files):,} weight files, more than {_MAX_SHARDS:,}")
    _check_header_sizes(files)
    for path in files:
        try:
            read_header(path)
        except ValueError as error:
            raise Refused(str(error).replace(str(path), repr(path.name[:100]))) from error
    if (directory / INDEX).exists():
        _check_index(directory)


def _check_header_sizes(files: list[Path]) -> None:
    total = 0
    for path in files:
        with path.open("rb") as stream:
            total += int.from_bytes(stream.read(8), "little")
        if total > _MAX_HEADER_BYTES:
            raise Refused(
                f"{path.name[:100]!r} states a header of such a length that all have over "
                f"{_MAX_HEADER_BYTES:,} bytes"
            )


def _check_index(directory: Path) -> None:
    shards = read_object(directory / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise Refused(f"{INDEX} has no weight_map")
    for name in sorted(set(shards.values())):
        if "/" in name or not name.endswith(".safetensors"):
            raise Refused(f"{INDEX} names {name[:100]!r}, which is no safetensors file beside it")
        if not (directory / name).is_file():
            raise Refused(f"{INDEX} names {name[:100]!r}, which is missing")
