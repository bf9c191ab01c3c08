"""Settings of API, workers and migrations, read once from the environment (`STILLHOUSE_*`)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.shared.jobs.quota import Quota
from services.shared.jobs.retention import Retention


class JobSettings(BaseSettings):
    """Locations and intervals that API, workers and migrations share."""

    model_config = SettingsConfigDict(env_prefix="STILLHOUSE_", frozen=True)

    database_url: str = Field(description="postgresql+psycopg://user:password@host:port/name")
    broker_url: str = Field(description="redis://host:port/0 or redis+socket:///path")
    data_dir: Path = Field(description="Datasets, runs, models: shared by API and workers.")
    model_roots: list[Path] = Field(
        [], description="Directories below which a spec may name base models (JSON list)."
    )
    host_memory: str | None = Field(
        None,
        description="Memory of the workers' host, for plans that do not name it: 125GB, 64GiB. "
        "On a CPU, this machine's if left out.",
    )
    engine: Literal["fsdp1", "fsdp2"] | None = Field(
        None, description="What shards on the workers; by the torch installed here if left out."
    )
    gate_min_macro_f1_share: float = Field(
        0.5,
        ge=0,
        le=2,
        description="Lowest share of its teacher's macro-F1 that any student must keep; a spec may ask "
        "for more, not for less.",
    )
    gate_min_macro_f1: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Lowest macro-F1 on every head with which a student passes its gate, however bad its "
        "teacher is.",
    )
    gate_min_gain_over_baseline: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="By how much the macro-F1 of any student must exceed that of its n-gram baseline on every "
        "head; a spec may ask for more, not for less. Not required if left out.",
    )
    lease_seconds: float = Field(
        60.0, gt=0, description="A worker that sends no heartbeat for this long loses its job."
    )
    heartbeat_seconds: float = Field(2.0, gt=0, description="How often a worker renews its lease.")
    sweep_seconds: float = Field(
        15.0, gt=0, description="How often expired leases and lost messages are looked for."
    )
    tidy_seconds: float = Field(
        600.0, gt=0, description="How often a worker removes files that killed processes have left."
    )
    delete_grace_days: float = Field(
        7.0, ge=0, description="How long a deletion can be undone; then the files are removed."
    )
    retention: Retention = Field(
        Retention(),
        description="How long what jobs leave behind is kept, by default, kind and tag (JSON, see "
        "operations.md).",
    )
    quota: Quota = Field(
        Quota(),
        description="Most stored_bytes, queued_jobs and running_jobs of one key (JSON); the keys file "
        "may set others.",
    )
    disk_full_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the disk from which jobs wait in the queue and uploads are refused.",
    )
    usage_seconds: float = Field(
        3600.0, gt=0, description="How often a worker measures what is stored, for forecasts."
    )
    stop_grace_seconds: float = Field(
        120.0, gt=0, description="How long ranks may save after a stop request before SIGTERM."
    )

    queue_aging_seconds: float = Field(
        6 * 3600.0,
        gt=0,
        description="A queued job gains a step of priority for each, up to the highest that is queued.",
    )
    audit_retention_days: float = Field(
        400.0, ge=1, description="How long entries of the audit log are kept."
    )

    @property
    def datasets_dir(self) -> Path:
        return self.data_dir / "datasets"

    @property
    def runs_dir(self) -> Path:
        return self.data_dir / "runs"

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def signals_dir(self) -> Path:
        return self.data_dir / "signals"

    @property
    def processors_dir(self) -> Path:
        return self.data_dir / "processors"

    @property
    def quarantine_dir(self) -> Path:
        return self.data_dir / "quarantine"

    def dataset_dir(self, dataset_id: str) -> Path:
        """Return the directory of a stored dataset."""
        return self.datasets_dir / dataset_id

    def model_dir(self, model_id: str) -> Path:
        """Return the directory of a registered model's artifact."""
        return self.models_dir / model_id

    def run_dir(self, job_id: str, attempt: int) -> Path:
        """Return the run directory of one attempt."""
        return self.runs_dir / job_id / str(attempt)
