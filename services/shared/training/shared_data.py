"""The texts and tokens of a job on one node: made by its first rank, mapped into memory by all."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from services.shared.datasets.card import Head
from services.shared.datasets.text import TextKind
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.state import Phase
from services.shared.model.mapped_arrays import DirectoryWriter, new_directory
from services.shared.model.mapped_rows import (
    Report,
    open_rows,
    open_tokens,
    write_rows,
    write_tokens,
)
from services.shared.model.tokens import Rows, TokenisedSplit
from services.shared.training.process import World
from services.shared.training.progress import Progress

REPORT_SECONDS = 2.0  # between two messages


class SharedData:
    """The mapped files of one attempt, in its run directory. Every method is collective."""

    def __init__(self, run: RunDirectory, world: World, progress: Progress) -> None:
        self._directory = run.path / "data"
        self._world = world
        self._progress = progress

    def rows(
        self,
        name: str,
        chunks: Callable[[DirectoryWriter], Iterable[Rows]],
        *,
        heads: Sequence[Head],
        kind: TextKind,
        source: Sequence[object],
    ) -> tuple[Path, Rows]:
        """Return the directory and the rows of `chunks`, which only the rank that writes them reads.

        `source` is everything that the rows follow from.
        """
        described = [*source, str(kind), *(head.model_dump(mode="json") for head in heads)]

        def write(writer: DirectoryWriter) -> None:
            self._progress.phase(Phase.LOADING, f"reading the texts of {name}")
            write_rows(writer, chunks(writer), heads, kind)

        directory = self._make(name, described, write)
        return directory, open_rows(directory, heads)

    def tokens(
        self,
        source: Path,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        prefix: str,
    ) -> TokenisedSplit:
        """Return the tokens of the rows of a directory that `rows` has returned."""
        described = [source.name, _digest(tokenizer), max_length, prefix]

        def write(writer: DirectoryWriter) -> None:
            report = self._reporter(source.name.partition(".")[0])
            write_tokens(
                writer, rows, tokenizer, max_length=max_length, prefix=prefix, report=report
            )

        return open_tokens(self._make("tokens", described, write), rows)

    def remove(self) -> None:
        """Delete the files once no rank opens them again; what is mapped stays readable."""
        self._world.barrier()
        if self._world.is_first_of_node:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _make(
        self, name: str, described: Sequence[object], write: Callable[[DirectoryWriter], None]
    ) -> Path:
        key = hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()[:16]
        directory = self._directory / f"{name}.{key}"
        if self._world.is_first_of_node and not directory.exists():
            with new_directory(directory) as writer:
                write(writer)
        self._world.barrier()
        return directory

    def _reporter(self, name: str) -> Report:
        last = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= REPORT_SECONDS:
                last = time.monotonic()
                message = f"tokenised {done:,} of {total:,} texts of {name}"
                self._progress.phase(Phase.LOADING, message)

        return report


def _digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that decides how a tokenizer divides texts, as far as it is known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [type(tokenizer).__name__, tokenizer.name_or_path, str(tokenizer.chat_template)]
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        parts.append(backend.to_str())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
