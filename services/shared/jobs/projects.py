"""Projects: whose datasets, jobs, models and aliases a caller may see.

Every resource belongs to one project, and refers only to resources of the same one. Those who want none of
this have one project, `default`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.shared.jobs.quota import UNLIMITED, Quota

DEFAULT_PROJECT = "default"
PROJECT_PATTERN = r"^[a-z][a-z0-9_-]{0,63}$"
_PROJECT = re.compile(PROJECT_PATTERN)


@dataclass(frozen=True, kw_only=True)
class Access:
    """Who uses a store: which rows it sees, and to whom those that it creates belong."""

    project: str = DEFAULT_PROJECT  # of what is created
    sees_all: bool = True  # the rows of every project, instead of `project` alone
    actor: str | None = None  # the name of the key, recorded with what it creates
    quota: Quota = UNLIMITED  # of that key

    @property
    def visible_project(self) -> str | None:
        """The only project whose rows are visible, or None for all of them."""
        return None if self.sees_all else self.project


def is_project(name: str) -> bool:
    """Return whether a name may be that of a project."""
    return _PROJECT.fullmatch(name) is not None


def qualified_alias(project: str, alias: str) -> str:
    """Return an alias's name among those of all projects; that of the default project is unchanged."""
    return alias if project == DEFAULT_PROJECT else f"{project}/{alias}"


def alias_seen_by(access: Access, qualified: str) -> str | None:
    """Return how a qualified alias is shown to a caller, or None if it is of a project that they do not see."""
    if access.sees_all:
        return qualified
    project, _, alias = qualified.rpartition("/")
    return alias if (project or DEFAULT_PROJECT) == access.project else None
