"""The folder of the program's repository."""

from pathlib import Path


def get_repo_root_path() -> str:
    """Return the nearest folder at or above the working directory that has a `.git`; `.` without one."""
    here = Path.cwd()
    return next((str(folder) for folder in (here, *here.parents) if (folder / ".git").exists()), ".")
