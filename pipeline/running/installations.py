"""Which installation a command means, what its settings are, and how to reach its log.

An installation is a folder with `config.toml` (the settings of its last start), `state.json` (what `journeywork up`
started) or a store. Commands that name none mean the one under `runs/` whose supervisor is running; if none or several
are, that in which one of these files changed last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.config import Config, ConfigError, NatsConfig, load
from pipeline.running.state import STATE, read_state

SETTINGS = "config.toml"
_SIGNS = (SETTINGS, STATE, "store", "store/*")
"""Glob patterns of the files by which a folder is taken for an installation."""


def find_installation(run_dir: str | Path | None = None) -> Path:
    """Return `run_dir`. If it is empty, return the installation under `runs/` whose supervisor is running, else the
    newest.

    Raises `ConfigError` if there is none."""
    if run_dir:
        return Path(run_dir)
    installations = installations_under(Path("runs"))
    if not installations:
        raise ConfigError("no installation under runs/: name one with --run-dir, or start one with `journeywork up`")
    states = ((folder, read_state(folder)) for folder in installations)
    running = [folder for folder, state in states if state is not None and state.running]
    return (running or installations)[-1]


def installations_under(root: Path) -> list[Path]:
    """Return the folders in `root` that are installations, the one whose files changed last at the end."""
    return [folder for changed, folder in sorted((_last_change(f), f) for f in root.glob("*/")) if changed]


def installation_settings(
    run_dir: str | Path | None = None,
    file: str | None = None,
    overrides: Sequence[str] = (),
    *,
    sections: Collection[str] = (),
) -> Config:
    """Return the settings of an installation, with the address of its log in `nats.url`; empty if none is known.

    `run_dir`: as in `find_installation`. `file`: settings to use in place of the installation's own. `sections`: the
    tables that the command needs, empty for all; the other tables may then hold settings of another version.

    The address is the first that is not empty: that of `overrides`, of `file`, of the server that `journeywork up`
    started (if that was stopped, there is no address), of the installation's own settings. Raises `ConfigError`."""
    source: str | Path | None = file
    folder = None
    if not file or run_dir:
        folder = find_installation(run_dir)
        if not file and not _last_change(folder):
            raise ConfigError(
                f"{folder} is no installation: name another with --run-dir, or start one with `journeywork up`"
            )
        saved = folder / SETTINGS
        source = file or (saved if saved.is_file() else None)
    config = load(source, overrides, sections=sections)
    if folder:
        config = config.replace(run_dir=str(folder))
    # The installation's own settings come after the server that was started: their address is emptied for this test.
    with_given_address = config if file else load(source, ["nats.url=", *overrides], sections=sections)
    if not with_given_address.nats.url and (state := read_state(Path(config.run_dir))) is not None:
        config = config.replace(nats=config.nats.replace(url=state.url("nats")))
    return config


def log_of(config: Config) -> NatsConfig:
    """Return `[nats]` of the result of `installation_settings`. Raises `ConfigError` if the log's address is not
    known."""
    if not config.nats.url:
        raise ConfigError(
            f"{config.run_dir}: the address of its log is not known, or its log is stopped. "
            "Give --set nats.url=nats://HOST:PORT, or start the installation with `journeywork up`"
        )
    return config.nats


def require_same_bases(config: Config) -> None:
    """Raise `ConfigError` if a model has checkpoints in the run directory and its base is another model than at the
    last start, by the bases' `config.json`. The trainer compares weights, but only when it has loaded them."""
    file = config.path(SETTINGS)
    if not file.is_file():
        return
    before = {m.name: m.base for m in load(file, sections=("models",)).models}
    for i, model in enumerate(config.models):
        old, new = (Path(base, "config.json") for base in (before.get(model.name, ""), model.base))
        checkpoints = config.path(config.trainer.checkpoints, config.project, config.trainer.branch, model.name)
        differs = old.is_file() and new.is_file() and old.read_bytes() != new.read_bytes()
        if differs and any(checkpoints.glob("step-*")):
            raise ConfigError(
                f"models.{i}.base: {model.name} was trained on {before[model.name]}, and {model.base} is another "
                "model: name that one, or give this model another name or --run-dir, where it begins at step 0"
            )


def _last_change(folder: Path) -> float:
    """Return when one of an installation's files changed last, in seconds since the epoch; 0 if there are none."""
    return max((path.stat().st_mtime for sign in _SIGNS for path in folder.glob(sign)), default=0.0)
