"""`journeywork restore`: make a run directory of a backup.

journeywork restore /mnt/backups/monday --run-dir runs/support
journeywork up --config journeywork.toml --run-dir runs/support
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path

import msgspec

from pipeline.commands.backup import MANIFEST, Manifest, copy, require_empty
from pipeline.config import ConfigError
from pipeline.files import sync
from pipeline.running import folder_lock
from pipeline.terminal.parsers import command_parser, exit_on_error


def restore(folder: Path, run_dir: Path) -> Manifest:
    """Make the run directory `run_dir`, which must be empty or missing, of the backup in `folder`. It is there whole or
    not at all.

    Raises `ConfigError` if the backup is incomplete or a file is not what it was."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{folder} is no complete backup ({error}): name a folder that `journeywork backup` finished"
        ) from error
    require_empty(run_dir)
    partial = run_dir.with_name(f".restoring-{run_dir.name}-{secrets.token_hex(4)}")
    try:
        folder_lock.make_private(partial)
        for name, file in manifest.files.items():
            # A name with `..`, or behind a link, may lie outside of the backup, or be written outside of the folder.
            source = folder.resolve() / name
            is_inside = source.resolve() == source and source.is_relative_to(folder.resolve())
            if not is_inside or not source.is_file() or copy(source, partial / name) != file:
                raise ConfigError(f"{folder / name} is not what was copied: the backup is damaged, use another")
        os.sync()
        if run_dir.exists():
            run_dir.rmdir()
        partial.rename(run_dir)
        sync(run_dir.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def main() -> None:
    """Run the command. Exits 0, or 2 if the backup can't be used."""
    parser = command_parser("restore", __doc__)
    parser.add_argument("folder", type=Path, help="what `journeywork backup` made")
    parser.add_argument("--run-dir", type=Path, required=True, help="a new run directory")
    args = parser.parse_args()
    os.umask(0o077)
    with exit_on_error("restore", (ConfigError, OSError)):
        manifest = restore(args.folder, args.run_dir)
    sys.stdout.write(
        f"{args.run_dir} holds the {len(manifest.files)} files of {manifest.run_dir}. Start it with the settings file "
        f"or the --set flags that it was started with, not with its own config.toml, which names the first directory: "
        f"journeywork up --config FILE --run-dir {args.run_dir}\n"
    )


if __name__ == "__main__":
    main()
