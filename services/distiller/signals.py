"""The teacher's answers to a corpus: asked for each batch, or once and kept.

Of a classifier's answer only a few numbers per text matter, so a whole corpus of them fits in memory
and in one safetensors file. Legend: N texts, B texts of a batch, C classes of a head, K tapped layers,
H hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from services.distiller.corpus import Sides
from services.distiller.signal_file import SignalFile, TeacherHashes, signal_file
from services.distiller.teacher import Teacher
from services.shared.jobs.run_directory import RunInput
from services.shared.jobs.spec import Distillation, Recipe
from services.shared.jobs.state import Reason
from services.shared.model.batches import plan_evaluation
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import collate
from services.shared.training.process import RunFailed, World, agreed_stop, blame

# Elements of one collective: 64 MiB of float32.
CHUNK_ELEMENTS = 16 * 2**20


class Signals:
    """The teacher's answers to one corpus, on every rank; only rank 0 is given a file."""

    def __init__(
        self,
        teacher: Teacher,
        sides: Sides,
        world: World,
        *,
        budget_tokens: int,
        tap: Sequence[int] = (),
        file: SignalFile | None = None,
    ) -> None:
        self._teacher: Teacher | None = teacher
        self._sides = sides
        self._world = world
        self._budget_tokens = budget_tokens
        self._tap = tuple(tap)
        self._file = file
        self._pad_id = teacher.tokenizer.pad_token_id
        size = len(sides.corpus)
        self._answers = {
            name: torch.full((size, len(classes)), torch.nan)
            for name, classes in teacher.files.columns.items()
        }
        if tap:
            width = teacher.files.config.hidden_size
            self._answers[TAPPED] = torch.full((size, len(tap), width), torch.nan).bfloat16()
        self.complete = False
        self._load()

    @property
    def num_bytes(self) -> int:
        """Return what the answers take, in memory on each rank and on disk."""
        return sum(values.nbytes for values in self._answers.values())

    def for_rows(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the answers [B, ...] to a micro-batch on the device; no rows give those to a dummy.

        All ranks must call this together while the answers are not complete.
        """
        if not self.complete:
            return self._ask(rows)
        chosen = list(rows) or [0]
        return {
            name: values[chosen].float().to(self._world.device)
            for name, values in self._answers.items()
        }

    def all_answers(self) -> dict[str, Tensor]:
        """Return the complete answers [N, C] by head, on the host."""
        assert self.complete
        return {name: values for name, values in self._answers.items() if name != TAPPED}

    def fill(self, tell: Callable[[int, int], None] | None = None) -> str | None:
        """Ask the teacher what is still missing; return the reason if the run is to stop meanwhile.

        `tell` hears how many texts have been answered, and of how many.
        """
        if self.complete:
            return None
        # In an epoch online each rank was answered about its own rows: without this exchange the
        # ranks would miss different texts, and plan different batches.
        self._exchange()
        missing = self._missing().nonzero().flatten().tolist()
        if missing:
            lengths = self._sides.teacher.lengths[missing]
            with blame(Reason.BAD_SPEC):
                steps = plan_evaluation(
                    lengths, budget_tokens=self._budget_tokens, ranks=self._world.size
                )
            done = 0
            for step in steps:
                (places,) = step.micro_batches[self._world.rank]
                self._ask([missing[place] for place in places])
                done += len(step.rows)
                if tell is not None:
                    tell(done, len(missing))
                stop = agreed_stop(self._world.sum(self._world.stopping.flags()))
                if stop is not None:
                    self.share()
                    return stop
        self.share()
        return None

    def share(self) -> None:
        """Exchange answers between the ranks and keep them; the teacher goes when none is missing."""
        if self.complete:
            return
        self._exchange()
        self.complete = not self._missing().any()
        if self._file is not None:
            self._file.write(self._answers)
        if self.complete:
            self._teacher = None

    def _ask(self, rows: Sequence[int]) -> dict[str, Tensor]:
        assert self._teacher is not None
        batch = collate(self._sides.teacher, rows, self._pad_id).to(self._world.device)
        found = self._teacher.ask(batch, self._tap)
        if rows:
            self._check(found, rows)
            for name, values in found.items():
                self._answers[name][list(rows)] = values.to(self._answers[name])
        return found

    def _check(self, found: dict[str, Tensor], rows: Sequence[int]) -> None:
        """Raise RunFailed naming the first text that the teacher has no finite answer to."""
        for name, values in found.items():
            broken = ~torch.isfinite(values).flatten(1).all(dim=1)
            if broken.any():
                row = rows[int(broken.nonzero()[0])]
                what = "hidden states" if name == TAPPED else f"logits of head {name}"
                raise RunFailed(
                    Reason.NON_FINITE_TEACHER,
                    f"The teacher's {what} are not finite for {self._sides.corpus.origin(row)}: "
                    "check the teacher, or compute in float32 (recipe.compute).",
                )

    def _missing(self) -> Tensor:
        """Return which texts lack an answer: bool [N]."""
        parts = [values.flatten(1).isnan().any(dim=1) for values in self._answers.values()]
        return torch.stack(parts).any(dim=0)

    def _load(self) -> None:
        """Take what the file of rank 0 holds."""
        kept = self._file.read() if self._file is not None else None
        (found,) = self._world.sum([float(kept is not None)])
        if not found:
            return
        for name, values in (kept or {}).items():
            self._answers[name].copy_(values)
        self._exchange()
        self.complete = not self._missing().any()

    def _exchange(self) -> None:
        """Give every rank every answer that any rank has."""
        for values in self._answers.values():
            flat = values.view(-1)
            for start in range(0, len(flat), CHUNK_ELEMENTS):
                part = flat[start : start + CHUNK_ELEMENTS]
                here = part.float().to(self._world.device)
                count = (~here.isnan()).float()
                total = here.nan_to_num()
                dist.all_reduce(total)
                dist.all_reduce(count)
                part.copy_(total / count)  # 0 / 0 where no rank has one


def signal_mode(wanted: Distillation, *, hidden: bool) -> str:
    """Return when the teacher is asked; hidden states are kept only where the spec says so."""
    return "online" if hidden and not wanted.cache_hidden else wanted.signals


def open_signals(
    task: RunInput,
    teacher: Teacher,
    hashes: TeacherHashes | None,
    sides: Sides,
    recipe: Recipe,
    world: World,
    *,
    tap: Sequence[int] = (),
) -> Signals:
    """Return the teacher's answers to a corpus, as far as an earlier job has kept them.

    Without `hashes` nothing is kept on disk; only rank 0 has them.
    """
    file = None
    if hashes is not None and len(sides.corpus):
        assert task.cache_dir is not None
        file = signal_file(
            task.cache_dir,
            teacher.files,
            hashes,
            sides.corpus,
            precision=str(recipe.compute),
            tap=tap,
        )
    budget_tokens = recipe.token_budget(task.spec.training)
    return Signals(teacher, sides, world, budget_tokens=budget_tokens, tap=tap, file=file)
