"""What jobs may use: workers and their machines, the queue, the disk, base models and kinds of devices."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import ContextDep, LifecycleDep, StoreDep
from services.api.openapi import problems
from services.shared.jobs.base_models import BaseModelView, list_base_models
from services.shared.jobs.lifecycle.report import storage_report
from services.shared.jobs.views import JobCounts
from services.shared.jobs.worker_reports import WorkerReport, read_worker_reports
from services.shared.memory.hardware import DEVICES

router = APIRouter(
    tags=["operations"],
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(401, 403, 422, 429, 500, 503),
)


class StorageView(BaseModel):
    """The disk of the data directory."""

    total_bytes: int
    used_bytes: int
    full_share: float  # from which jobs wait and uploads are refused
    stored_bytes: dict[str, int]  # by kind of file, at the last sample
    bytes_per_day: float | None  # None while there are too few samples
    days_until_full: float | None  # at that growth; None also where it does not grow


class NodeView(BaseModel):
    """The workers that run, the jobs that wait for them or run, and the disk."""

    workers: list[WorkerReport]
    jobs: list[JobCounts]  # of the caller's project
    storage: StorageView


class DeviceView(BaseModel):
    """A kind of device that plans know: `resources.device`."""

    name: str
    memory_bytes: int
    reserve_bytes: int  # that tensors never get


class BaseModels(BaseModel):
    """The models that a spec may name by `path`."""

    items: list[BaseModelView]


class Devices(BaseModel):
    """The kinds of devices that a spec may name."""

    items: list[DeviceView]


@router.get("/node", operation_id="get_node")
def get_node(context: ContextDep, store: StoreDep, lifecycle: LifecycleDep) -> NodeView:
    """Show each worker with what `doctor` finds on its machine, the queue, and the disk."""
    report = storage_report(lifecycle)
    return NodeView(
        workers=read_worker_reports(context.settings),
        jobs=store.job_counts(),
        storage=StorageView(
            total_bytes=report.disk.total_bytes,
            used_bytes=report.disk.used_bytes,
            full_share=report.full_share,
            stored_bytes=report.stored_bytes,
            bytes_per_day=report.forecast and report.forecast.bytes_per_day,
            days_until_full=report.forecast and report.forecast.days_until_full,
        ),
    )


@router.get("/base-models", operation_id="list_base_models")
def get_base_models(context: ContextDep) -> BaseModels:
    """List the models below the model roots of the server."""
    return BaseModels(items=list_base_models(list(context.settings.model_roots)))


@router.get("/devices", operation_id="list_devices")
def get_devices() -> Devices:
    """List the kinds of devices that plans know."""
    return Devices(
        items=[
            DeviceView(
                name=device.name,
                memory_bytes=device.memory_bytes,
                reserve_bytes=device.reserve_bytes,
            )
            for device in DEVICES.values()
        ]
    )
