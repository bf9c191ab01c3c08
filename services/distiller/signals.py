"""The teacher's answers to a corpus: asked for each batch, or once and kept.

Of a classifier's answer only a few numbers per text matter, so a whole corpus of them fits in memory
and in one safetensors file. Legend: N texts, B texts of a batch, C classes of a head, K tapped layers,
H hidden size of the teacher.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.distiller.corpus import Sides
from services.distiller.teacher import Teacher, TeacherFiles
from services.shared.fsdp.process import RunFailed, World, agreed_stop
from services.shared.fsdp.tensor_files import sync_directory
from services.shared.jobs.state import Reason
from services.shared.model.artifact import file_sha256, weights_sha256
from services.shared.model.batches import plan_evaluation
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import collate

log = logging.getLogger(__name__)

# Elements of one collective: 64 MiB of float32.
CHUNK_ELEMENTS = 16 * 2**20


class Identity(BaseModel):
    """What kept answers are answers to; one field that differs makes them useless."""

    model_config = ConfigDict(frozen=True)

    teacher_sha256: str  # weights, heads and config
    tokenizer_sha256: str
    text_sha256: str  # of all texts, in order
    max_length: int  # tokens after which the teacher's texts are cut
    precision: str
    outputs: dict[str, list[int]]  # head -> the teacher's classes in the order kept; tapped layers


class SignalFile:
    """One safetensors file of answers, whole or not there at all."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity

    def read(self) -> dict[str, Tensor] | None:
        """Return the answers; None, with a warning that names the difference, where they do not match."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                kept = Identity.model_validate_json((file.metadata() or {})["identity"])
                difference = _difference(kept, self.identity)
                if difference is None:
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            difference = f"it cannot be read ({error})"
        log.warning("The teacher's kept answers in %s are ignored: %s.", self.path, difference)
        return None

    def write(self, answers: dict[str, Tensor]) -> None:
        """Keep answers, rows of NaN standing for those not asked yet. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(f".{self.path.name}.partial")
        save_file(answers, aside, metadata={"identity": self.identity.model_dump_json()})
        aside.replace(self.path)
        sync_directory(self.path.parent)


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
        missing = self._missing().nonzero().flatten().tolist()
        if missing:
            lengths = self._sides.teacher.lengths[missing]
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


def signal_file(
    cache_dir: Path, teacher: TeacherFiles, sides: Sides, *, precision: str, tap: Sequence[int]
) -> SignalFile:
    """Return where answers of this teacher to these texts are kept."""
    outputs = {name: list(order) for name, order in teacher.columns.items()}
    if tap:
        outputs[TAPPED] = list(tap)
    identity = Identity(
        teacher_sha256=_teacher_sha256(teacher),
        tokenizer_sha256=_tokenizer_sha256(teacher.directory),
        text_sha256=_text_sha256(sides.corpus.rows.texts),
        max_length=teacher.max_length,
        precision=precision,
        outputs=outputs,
    )
    # The name says whose answers to what; whether they still hold is for the hashes to say.
    about = [str(teacher.directory), sorted(outputs), [s.name for s in sides.corpus.sources]]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    dataset = sides.corpus.sources[0].name.replace("/", "-")
    return SignalFile(cache_dir / f"{dataset}-{name}.safetensors", identity)


def _difference(kept: Identity, now: Identity) -> str | None:
    for field, what in (
        ("teacher_sha256", "the hash of the teacher's weights"),
        ("tokenizer_sha256", "the hash of the teacher's tokenizer"),
        ("text_sha256", "the hash of the texts"),
        ("max_length", "the truncation"),
        ("precision", "the precision"),
        ("outputs", "the set of heads, classes or layers"),
    ):
        before, after = getattr(kept, field), getattr(now, field)
        if before != after:
            return f"{what} was {_short(before)}, now it is {_short(after)}"
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12]


def _teacher_sha256(teacher: TeacherFiles) -> str:
    digest = hashlib.sha256(weights_sha256(teacher.directory).encode())
    digest.update(file_sha256(teacher.directory / "config.json").encode())
    return digest.hexdigest()


def _tokenizer_sha256(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        # Whatever is neither weights nor about the model belongs to the tokenizer.
        if path.suffix in (".json", ".txt", ".model") and path.stem.lower().startswith(
            ("token", "vocab", "merges", "special", "added", "spiece", "sentencepiece", "bpe")
        ):
            digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _text_sha256(texts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
