"""What `auto` means on a processor: its number format and its number of ranks. Torch-free.

On accelerators `auto` is bfloat16. On a CPU it depends on the processor: bfloat16 runs at twice the speed of
float32 with AMX or AMD's AVX512_BF16, and several times slower where it is emulated. The worker measures
it before the ranks start (`training/prepare.py`) and keeps the result in the data directory. Admission, which
may run on another machine, uses what has been measured for such a processor, and assumes otherwise.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from services.shared.files.atomic_write import write_text
from services.shared.jobs.documents import DecisionDict
from services.shared.jobs.resolved_spec import ResolvedSpec
from services.shared.jobs.run_directory import LayerSize, MatmulTimes
from services.shared.jobs.spec import Recipe, Resources, TeacherSpec
from services.shared.jobs.teacher_layers import kept_layers
from services.shared.memory import hardware
from services.shared.memory.recipe import BFLOAT16_OPTIMIZERS

_CPUINFO = Path("/proc/cpuinfo")
_NODES = Path("/sys/devices/system/node")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_DEFAULT_RANKS = 2  # on accelerators without `visible_devices`
# bfloat16 loses precision, so that it has to be faster by more than the error of the measurement.
MIN_GAIN = 1.1


def is_auto(recipe: Recipe) -> bool:
    """Return whether a recipe leaves a number format open."""
    return "auto" in (recipe.compute, recipe.reduce)


def settle_recipe(
    recipe: Recipe, *, device: str, times: MatmulTimes | None
) -> tuple[Recipe, list[DecisionDict]]:
    """Return a recipe without `auto`, and how that was decided on a CPU.

    `times` is None where nothing has been measured. `reduce` follows `compute`.
    """
    if not is_auto(recipe):
        return recipe, []
    compute: str = recipe.compute
    decisions: list[DecisionDict] = []
    if recipe.compute == "auto":
        compute, decisions = _compute(recipe, device=device, times=times)
    reduce = compute if recipe.reduce == "auto" else recipe.reduce
    settled = recipe.model_copy(update={"compute": compute, "reduce": reduce})
    return Recipe.model_validate(settled.model_dump()), decisions


def num_ranks(resources: Resources) -> int:
    """Return the number of ranks; `auto` on a CPU is one for each NUMA node, with all its cores.

    Ranks exchange every gradient, threads of one rank share them.
    """
    if resources.ranks != "auto":
        return resources.ranks
    if _is_cpu(resources.device):
        return num_numa_nodes()
    return len(resources.visible_devices or ()) or _DEFAULT_RANKS


def ranks_decisions(resources: Resources) -> list[DecisionDict]:
    """Return how the number of ranks was decided on a CPU."""
    if resources.ranks != "auto" or not _is_cpu(resources.device):
        return []
    why = f"one rank for each NUMA node of the machine, with {num_cores()} threads in all"
    value = num_ranks(resources)
    return [{"field": "resources.ranks", "value": value, "basis": "machine", "why": why}]


def source_decisions(
    resolved: ResolvedSpec, *, vocab_size: int, teacher_layers: int | None
) -> list[DecisionDict]:
    """Return what a spec leaves open about the weights that its model starts from.

    `teacher_layers` is the number of layers of a distillation's teacher.
    """
    decisions: list[DecisionDict] = []
    part = "model" if isinstance(resolved.spec, TeacherSpec) else "student"
    if resolved.source.trim_vocabulary and resolved.vocabulary_rows is None:
        decisions.append(
            {
                "field": f"{part}.trim_vocabulary",
                "value": vocab_size,
                "basis": "assumed",
                "why": "planned with all rows; those that are kept are counted before the ranks start",
            }
        )
    wanted = resolved.source.layers_of_teacher
    if isinstance(wanted, int) and teacher_layers is not None:
        layers = ", ".join(map(str, kept_layers(wanted, num_layers=teacher_layers)))
        decisions.append(
            {
                "field": f"{part}.layers_of_teacher",
                "value": wanted,
                "basis": "teacher",
                "why": f"layers {layers} of the teacher's {teacher_layers}, counted from 0; a list takes others",
            }
        )
    return decisions


def read_times(processors_dir: Path, size: LayerSize) -> MatmulTimes | None:
    """Return what was measured on such a processor for layers of this size, or None."""
    try:
        return MatmulTimes.model_validate_json(_times_file(processors_dir, size).read_bytes())
    except (OSError, ValidationError):
        return None


def write_times(processors_dir: Path, times: MatmulTimes) -> None:
    """Keep a measurement for later jobs on such a processor. Raises OSError."""
    path = _times_file(processors_dir, times.size)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, times.model_dump_json())


def bf16_is_faster(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU should multiply bfloat16 faster than float32: with AMX, or AMD's AVX512_BF16.

    Intel's AVX512_BF16 without AMX (on guests whose host hides AMX) is slower: products of 64 to 512
    tokens ran at 0.52 to 0.58 of the float32 speed (Emerald Rapids, torch 2.13).
    """
    if not cpuinfo.exists():
        return False
    text = cpuinfo.read_text()
    return "amx_bf16" in text or ("avx512_bf16" in text and "AuthenticAMD" in text)


@cache
def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the processor's name as the kernel prints it."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else os.uname().machine


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def num_numa_nodes(nodes: Path = _NODES) -> int:
    """Return on how many NUMA nodes the cores of this process are."""
    mine = os.sched_getaffinity(0)
    lists = [path.read_text() for path in nodes.glob("node[0-9]*/cpulist")]
    return max(1, sum(1 for text in lists if mine & _numbers(text)))


def _compute(
    recipe: Recipe, *, device: str, times: MatmulTimes | None
) -> tuple[str, list[DecisionDict]]:
    if (
        not _is_cpu(device)
        or recipe.parameters == "bfloat16"
        or recipe.optimizer in BFLOAT16_OPTIMIZERS
    ):
        return "bfloat16", []  # parameters are not gathered in a wider format than their own
    if times is None:
        value = "bfloat16" if bf16_is_faster() else "float32"
        why = f"by the instruction set of {processor_name()}; measured before the ranks start"
        return value, [_decision(value, "assumed", why)]
    value = "bfloat16" if times.gain >= MIN_GAIN else "float32"
    measured = f"{times.gain:.1f} times faster"
    if times.gain < 1:
        measured = f"{1 / times.gain:.1f} times slower"
    where = f"{times.processor}, {times.threads} threads, layers of {times.size.hidden} x "
    why = f"bfloat16 measured {measured} than float32 ({where}{times.size.intermediate})"
    return value, [_decision(value, "measured", why)]


def _decision(value: str, basis: str, why: str) -> DecisionDict:
    return {"field": "recipe.compute", "value": value, "basis": basis, "why": why}


def _is_cpu(device: str) -> bool:
    return hardware.find_device(device).name == "cpu"


def _times_file(processors_dir: Path, size: LayerSize) -> Path:
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    flags = [flag for flag in _FLAGS if re.search(rf"\b{flag}\b", text)]
    kind = f"{processor_name()} {num_cores()} {' '.join(flags)}"
    digest = hashlib.sha256(kind.encode()).hexdigest()[:16]
    return processors_dir / f"{digest}-{size.hidden}x{size.intermediate}.json"


def _numbers(text: str) -> set[int]:
    """Return the numbers of a kernel's list, such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
