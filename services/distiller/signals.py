"""The teacher's outputs for a corpus, computed online for each batch or once and cached.

A classifier outputs only a few numbers per text, so those for a whole corpus fit in memory and in one
safetensors file. Legend: N texts, B texts of a batch, C classes of a head, K tapped layers, H hidden
size of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from services.distiller.inputs import TokenisedPair
from services.distiller.signal_file import SignalFile, TeacherHashes, signal_file
from services.distiller.teacher import Teacher
from services.shared.jobs.run_directory import RunInput
from services.shared.jobs.spec import Distillation, Recipe
from services.shared.jobs.state import Reason
from services.shared.model.batches import plan_evaluation
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import collate
from services.shared.training.process import RunFailed, World, agreed_stop, fail_with

# Elements of one collective: 64 MiB of float32.
CHUNK_ELEMENTS = 16 * 2**20


class Signals:
    """The teacher's outputs for one corpus, on every rank; only rank 0 reads and writes the file.

    Outputs that are not computed yet are NaN.
    """

    def __init__(
        self,
        teacher: Teacher,
        pair: TokenisedPair,
        world: World,
        *,
        budget_tokens: int,
        tap: Sequence[int] = (),
        file: SignalFile | None = None,
    ) -> None:
        self.pair = pair
        self.file = file
        self.complete = False
        self.teacher: Teacher | None = teacher
        self._world = world
        self._budget_tokens = budget_tokens
        self._tap = tuple(tap)
        self._pad_id = teacher.tokenizer.pad_token_id
        size = len(pair.corpus)
        self._outputs = {
            name: torch.full((size, len(classes)), torch.nan)
            for name, classes in teacher.files.columns.items()
        }
        if tap:
            width = teacher.files.config.hidden_size
            self._outputs[TAPPED] = torch.full((size, len(tap), width), torch.nan).bfloat16()
        self._load()

    @property
    def num_bytes(self) -> int:
        """Return the size of the outputs, in memory on each rank and on disk."""
        return sum(values.nbytes for values in self._outputs.values())

    def for_rows(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the outputs [B, ...] for a micro-batch, on the device; without rows, for a dummy text.

        Collective while the outputs are incomplete.
        """
        if not self.complete:
            return self._query(rows)
        chosen = list(rows) or [0]
        return {
            name: values[chosen].float().to(self._world.device)
            for name, values in self._outputs.items()
        }

    def logits(self) -> dict[str, Tensor]:
        """Return the complete logits [N, C] by head, on the host."""
        assert self.complete
        return {name: values for name, values in self._outputs.items() if name != TAPPED}

    def fill(self, report: Callable[[int, int], None] | None = None) -> str | None:
        """Compute the missing outputs; return the reason if a stop is requested meanwhile.

        `report` is called with the number of texts done and the number of texts to do. Collective.
        """
        if self.complete:
            return None
        # Online, each rank has outputs for its own rows only: without this exchange the ranks would
        # miss different texts and plan different batches.
        self._exchange()
        missing = self._missing().nonzero().flatten().tolist()
        if missing:
            lengths = self.pair.teacher.lengths[missing]
            with fail_with(Reason.BAD_SPEC):
                steps = plan_evaluation(
                    lengths, budget_tokens=self._budget_tokens, ranks=self._world.size
                )
            done = 0
            for step in steps:
                (indices,) = step.micro_batches[self._world.rank]
                self._query([missing[index] for index in indices])
                done += len(step.rows)
                if report is not None:
                    report(done, len(missing))
                stop = agreed_stop(self._world.sum(self._world.stopping.flags()))
                if stop is not None:
                    self.synchronise()
                    return stop
        self.synchronise()
        return None

    def synchronise(self) -> None:
        """Exchange outputs between the ranks and write the file; release the teacher when complete."""
        if self.complete:
            return
        self._exchange()
        self.complete = not self._missing().any()
        if self.file is not None:
            self.file.write(self._outputs)
        if self.complete:
            self.teacher = None

    def _query(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Run the teacher on some texts and record its outputs."""
        assert self.teacher is not None
        batch = collate(self.pair.teacher, rows, self._pad_id).to(self._world.device)
        outputs = self.teacher.predict_batch(batch, self._tap)
        if rows:
            self._check_finite(outputs, rows)
            for name, values in outputs.items():
                self._outputs[name][list(rows)] = values.to(self._outputs[name])
        return outputs

    def _check_finite(self, outputs: dict[str, Tensor], rows: Sequence[int]) -> None:
        """Raise RunFailed naming the first text for which the teacher's output is not finite."""
        for name, values in outputs.items():
            broken = ~torch.isfinite(values).flatten(1).all(dim=1)
            if broken.any():
                row = rows[int(broken.nonzero()[0])]
                what = "hidden states" if name == TAPPED else f"logits of head {name}"
                raise RunFailed(
                    Reason.NON_FINITE_TEACHER,
                    f"The teacher's {what} are not finite for {self.pair.corpus.origin(row)}: "
                    "check the teacher, or compute in float32 (recipe.compute).",
                )

    def _missing(self) -> Tensor:
        """Return which texts lack an output: bool [N]."""
        parts = [values.flatten(1).isnan().any(dim=1) for values in self._outputs.values()]
        return torch.stack(parts).any(dim=0)

    def _load(self) -> None:
        """Load what the file of rank 0 contains."""
        cached = self.file.read() if self.file is not None else None
        (found,) = self._world.sum([float(cached is not None)])
        if not found:
            return
        for name, values in (cached or {}).items():
            self._outputs[name].copy_(values)
        self._exchange()
        self.complete = not self._missing().any()

    def _exchange(self) -> None:
        """Give every rank the outputs that any rank has."""
        for values in self._outputs.values():
            flat = values.view(-1)
            for start in range(0, len(flat), CHUNK_ELEMENTS):
                part = flat[start : start + CHUNK_ELEMENTS]
                local = part.float().to(self._world.device)
                count = (~local.isnan()).float()
                total = local.nan_to_num()
                dist.all_reduce(total)
                dist.all_reduce(count)
                part.copy_(total / count)  # 0 / 0 where no rank has one


def signal_mode(distillation: Distillation, *, hidden: bool) -> str:
    """Return when the teacher runs; hidden states are cached only where the spec requests it."""
    return "online" if hidden and not distillation.cache_hidden else distillation.signals


def open_signals(
    task: RunInput,
    teacher: Teacher,
    hashes: TeacherHashes | None,
    pair: TokenisedPair,
    recipe: Recipe,
    world: World,
    *,
    tap: Sequence[int] = (),
) -> Signals:
    """Return the teacher's outputs for a corpus, with those that an earlier job has cached.

    Nothing is cached on disk without `hashes`, which only rank 0 is given.
    """
    file = None
    if hashes is not None and len(pair.corpus):
        assert task.cache_dir is not None
        file = signal_file(
            task.cache_dir,
            teacher.files,
            hashes,
            pair.corpus,
            precision=str(recipe.compute),
            tap=tap,
        )
    budget_tokens = recipe.token_budget(task.spec.training)
    return Signals(teacher, pair, world, budget_tokens=budget_tokens, tap=tap, file=file)
