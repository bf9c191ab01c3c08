"""Arrays and texts in a directory of files that the ranks of a node map into memory, and so share.

    <directory>/NAME.bin     the elements of one array, in order
    <directory>/meta.json    Meta: the types, the lengths and what else the writer records

The directory appears by one rename once all its files are on disk: a process that dies leaves nothing
that is ever read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, overload

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from services.shared.datasets.text import Text, TextKind, from_columns, to_columns
from services.shared.files.atomic_write import partial_path, sync
from services.shared.jobs.run_directory import write_json

Array = npt.NDArray[Any]
META = "meta.json"


class ArrayMeta(BaseModel):
    """The type and the shape of one array."""

    dtype: str
    shape: tuple[int, ...]


class Meta(BaseModel):
    """What a directory of arrays holds."""

    arrays: dict[str, ArrayMeta]
    values: dict[str, int | str] = {}


class ArrayWriter:
    """Appends rows to one array of a directory."""

    def __init__(
        self, directory: Path, name: str, dtype: str, *, columns: int | None = None
    ) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._columns = columns
        self._elements = 0
        self._file: IO[bytes] = (directory / f"{name}.bin").open("wb")

    def append(self, values: Array) -> None:
        """Append the values [N], or [N, columns]. Raises OSError."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self._elements += values.size

    def close(self) -> ArrayMeta:
        """Close the file, and return its description. Raises OSError."""
        self._file.close()
        columns = self._columns
        shape = (self._elements,) if columns is None else (self._elements // columns, columns)
        return ArrayMeta(dtype=self._dtype.str, shape=shape)


class DirectoryWriter:
    """Writes the arrays of one directory in parts; every array is written to its end by `finish`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: list[ArrayWriter] = []
        self.values: dict[str, int | str] = {}

    def array(self, name: str, dtype: str, *, columns: int | None = None) -> ArrayWriter:
        """Return a new array of rows, each of one element or of `columns`."""
        writer = ArrayWriter(self._directory, name, dtype, columns=columns)
        self._writers.append(writer)
        return writer

    def finish(self) -> None:
        """Close all arrays and describe them. Raises OSError."""
        arrays = {writer.name: writer.close() for writer in self._writers}
        write_json(self._directory / META, Meta(arrays=arrays, values=self.values))

    def __enter__(self) -> DirectoryWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.finish()
        else:
            for writer in self._writers:
                writer.close()


@contextmanager
def new_directory(final: Path) -> Iterator[DirectoryWriter]:
    """Yield a writer of the directory `final`, which appears when the block ends. Raises OSError.

    Where another process has made it meanwhile, that one is kept.
    """
    partial = partial_path(final)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with DirectoryWriter(partial) as writer:
            yield writer
        for path in [*partial.iterdir(), partial]:
            sync(path)
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        sync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class ArrayDirectory:
    """The arrays of a finished directory, mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.meta = Meta.model_validate_json((directory / META).read_bytes())

    def array(self, name: str) -> Array:
        """Return an array; what is written to it stays in this process."""
        meta = self.meta.arrays[name]
        if 0 in meta.shape:
            return np.zeros(meta.shape, dtype=meta.dtype)
        path = self._directory / f"{name}.bin"
        # As a plain array: np.memmap's own indexing takes a microsecond longer.
        return np.asarray(np.memmap(path, dtype=meta.dtype, mode="c", shape=meta.shape))


class TextWriter:
    """Appends texts to a directory of arrays."""

    def __init__(self, writer: DirectoryWriter, kind: TextKind) -> None:
        writer.values["text_kind"] = str(kind)
        names = ("text", "text_pair") if kind is TextKind.PAIR else ("text",)
        self._parts = [
            (writer.array(name, "u1"), writer.array(f"{name}.ends", "<i8")) for name in names
        ]
        self._positions = [0] * len(names)

    def append(self, texts: Sequence[Text]) -> None:
        """Append texts of the kind. Raises OSError."""
        stored = [to_columns(text) for text in texts]
        for number, (characters, ends) in enumerate(self._parts):
            encoded = [(columns[number] or "").encode() for columns in stored]
            sizes = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
            characters.append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
            ends.append(self._positions[number] + np.cumsum(sizes))
            self._positions[number] += int(sizes.sum())


class MappedTexts(Sequence[Text]):
    """The texts of a directory, decoded one by one as they are read."""

    def __init__(self, directory: ArrayDirectory) -> None:
        self._kind = TextKind(directory.meta.values["text_kind"])
        names = ("text", "text_pair") if self._kind is TextKind.PAIR else ("text",)
        self._parts = [(directory.array(name), directory.array(f"{name}.ends")) for name in names]

    def __len__(self) -> int:
        return len(self._parts[0][1])

    @overload
    def __getitem__(self, index: int) -> Text: ...
    @overload
    def __getitem__(self, index: slice) -> list[Text]: ...
    def __getitem__(self, index: int | slice) -> Text | list[Text]:
        if isinstance(index, slice):
            return [self._text(row) for row in range(*index.indices(len(self)))]
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(index)
        return self._text(row)

    def _text(self, row: int) -> Text:
        parts = []
        for characters, ends in self._parts:
            start = int(ends[row - 1]) if row else 0
            parts.append(bytes(characters[start : int(ends[row])]).decode())
        return from_columns(self._kind, parts[0], parts[1] if len(parts) == 2 else None)
