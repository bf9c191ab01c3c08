"""From a memory failure of our own ranks to a diagnosis and the remedy that fits."""

from __future__ import annotations

from services.shared.jobs.rundir import RunDirectory
from services.shared.jobs.views import Claim
from services.shared.launch.supervise import Ending
from services.shared.launch.verdict import Blame, PostMortem


def examine_memory(blame: Blame, *, claim: Claim, run: RunDirectory, ending: Ending) -> PostMortem:
    """Read the failure against the job's plan."""
    return PostMortem(None, {})
