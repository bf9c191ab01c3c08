"""Host memory of a job: processes, loading, what is offloaded, the export."""

from __future__ import annotations

from typing import NamedTuple

from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.plan_contract import HostPlanDict
from services.shared.memory.planning.rank_job import RankJob
from services.shared.memory.recipe import Loading, Offload
from services.shared.memory.sizes import GIB, MIB

# torch, transformers and accelerate imported take 333 MiB of a process (measured 2026-11 on Debian
# 12, CPU build); an accelerator's runtime maps about as much again into the host.
RANK_PROCESS_BYTES = 768 * MIB
# A loader process is a fork with batches of its own; a supervisor takes 62 MiB (measured as above).
DATA_WORKER_BYTES = 96 * MIB
# services/shared/training/sharding/load.py reads 4 Mi elements at a time; 64 MiB for a moment while it sums them.
LOADING_CHUNK_BYTES = 64 * MIB
# The plan of an epoch holds each training text's number as a Python integer in a tuple (40 bytes), and twice
# while the next one is made; the offsets of its tokens and its place in the order take 8 bytes each. Texts,
# tokens and labels are in mapped files, which all ranks share and the kernel may drop.
DATA_BYTES_PER_TEXT = 128
# Page cache, mapped files, pinned staging buffers and allocator slack are outside this sum.
HOST_UNCERTAINTY_BYTES = 4 * GIB


class HostPlan(NamedTuple):
    """Bytes of host memory, over all ranks of the host.

    Loading and training do not coincide; `export` comes on top of what training holds.
    """

    processes: int
    data: int
    offloaded: int
    loading: int
    export: int

    @property
    def peak_bytes(self) -> int:
        """The highest of loading, training and export."""
        always = self.processes + self.data
        return max(always + self.loading, always + self.offloaded + self.export)

    def to_dict(self) -> HostPlanDict:
        """Return the parts as plain values."""
        return HostPlanDict(
            processes=self.processes,
            data=self.data,
            offloaded=self.offloaded,
            loading=self.loading,
            export=self.export,
        )


def host_plan(job: RankJob, hardware: Hardware, *, teacher: RankJob | None = None) -> HostPlan:
    """Return the host memory of `job`, with all ranks on one host; a `teacher` is loaded as well."""
    recipe, ranks = job.recipe, hardware.ranks
    units = job.units
    offloaded = 0
    if recipe.offload is not Offload.NONE:
        # The update runs where the state is: gradients and parameters need a copy on the host too.
        for part in ("optimizer_bytes", "parameter_bytes", "gradient_bytes"):
            offloaded += units.total(part)
    largest = max(unit.largest_tensor_elements for unit in units.all)
    workers = ranks * recipe.data_workers * DATA_WORKER_BYTES
    return HostPlan(
        processes=ranks * RANK_PROCESS_BYTES + workers,
        data=ranks * recipe.training_texts * DATA_BYTES_PER_TEXT,
        offloaded=offloaded * ranks,
        loading=sum(_loading_bytes(loaded, ranks) for loaded in (job, teacher) if loaded),
        export=largest * recipe.compute.size_bytes,
    )


def _loading_bytes(job: RankJob, ranks: int) -> int:
    recipe = job.recipe
    whole = job.shape.num_parameters * recipe.checkpoint.size_bytes
    if recipe.loading is Loading.RANK0:
        return whole
    if recipe.loading is Loading.EVERY_RANK:
        return ranks * whole
    kept = job.units.total("parameter_bytes") if recipe.offload is Offload.ALL else 0
    return ranks * (LOADING_CHUNK_BYTES + kept)
