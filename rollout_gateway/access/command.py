"""Make, list and revoke API keys: `journeywork keys`. A running gateway uses a change within two seconds.

    journeywork keys add --name ci --model support --expires 30d  print a key to standard error, add its hash to a file
    journeywork keys revoke --name ci
    journeywork keys list

The file is the run's `gateway.keys_file`, by default `keys.toml` in the run directory. It holds hashes only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import tomli_w

from pipeline.config import Config, ConfigError, KeyConfig
from pipeline.files import write_whole
from pipeline.names import InvalidNameError, check_name
from pipeline.running.installations import SETTINGS, find_installation, installation_settings
from pipeline.security.key_file import expires_at, name_of, read_keys
from pipeline.terminal.parsers import command_parser, exit_on_error

PREFIX = "jw-"
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits with 2 on invalid usage, and with 1 if no key matches or several match a hash."""
    args = _parser().parse_args(argv)
    with exit_on_error("keys", (ConfigError,)):
        args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("keys", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    file = argparse.ArgumentParser(add_help=False)
    file.add_argument("--run-dir", type=Path, help="default: the running one under runs/, else the newest")
    file.add_argument("--file", type=Path, help="path of the file of keys")
    add = commands.add_parser("add", parents=[file], help="make a key and add it to the file")
    add.add_argument("--name", required=True, help="owner of the runs that the key opens")
    add.add_argument("--role", choices=("agent", "feedback", "operator"), default="agent")
    add.add_argument("--calls-per-minute", type=int, default=0, help="default: 0, no limit")
    add.add_argument("--model", action="append", default=[], help="may be repeated; default: all")
    add.add_argument("--calls-only", action="store_true", help="it may not open, read or complete runs")
    add.add_argument("--expires", default="", help="30m, 12h, 30d or 2w from now")
    add.set_defaults(run=_add)
    revoke = commands.add_parser("revoke", parents=[file], help="remove keys from the file")
    which = revoke.add_mutually_exclusive_group(required=True)
    which.add_argument("--name", help="all keys of this name")
    which.add_argument("--sha256", help="the key whose hash begins with this")
    revoke.set_defaults(run=_revoke)
    commands.add_parser("list", parents=[file], help="list the keys in the file").set_defaults(run=_list)
    return parser


def _path(args: argparse.Namespace) -> Path:
    """Return the path of the file of keys: `--file`, else that of the installation. Raises `ConfigError`."""
    if args.file is not None:
        return Path(args.file)
    folder = find_installation(args.run_dir)
    config = Config(run_dir=str(folder))
    if not folder.is_dir():
        file = config.path(config.gateway.keys_file)
        raise ConfigError(
            f"{folder} is no run: name another with --run-dir. For keys before its first start: --file {file}"
        )
    if (folder / SETTINGS).is_file():
        config = installation_settings(folder, sections=("gateway",))
    return config.path(config.gateway.keys_file)


def _new_key(args: argparse.Namespace) -> tuple[str, KeyConfig]:
    """Make a random key. Returns it and its settings. Raises `ConfigError` for invalid arguments."""
    try:
        check_name(args.name)
    except InvalidNameError as error:
        raise ConfigError(f"--name: {error}") from error
    if args.calls_per_minute < 0:
        raise ConfigError(f"--calls-per-minute is {args.calls_per_minute}: give 0 (no limit) or more")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, KeyConfig(
        sha256=hashlib.sha256(key.encode()).hexdigest(),
        name=args.name,
        role=args.role,
        calls_per_minute=args.calls_per_minute,
        models=tuple(args.model),
        calls_only=args.calls_only,
        expires=_expiry(args.expires) if args.expires else "",
    )


def _expiry(text: str) -> str:
    """Convert `--expires` to ISO 8601. Raises `ConfigError` if it is invalid."""
    span = re.fullmatch(r"([1-9][0-9]{0,4})([mhdw])", text)
    if span is None:
        raise ConfigError(f"--expires {text!r} is invalid: give minutes, hours, days or weeks (30m, 12h, 30d, 2w)")
    end = datetime.now(UTC) + timedelta(**{_UNITS[span[2]]: int(span[1])})
    return end.isoformat(timespec="seconds")


@contextmanager
def _editing(path: Path) -> Iterator[list[KeyConfig]]:
    """Give the keys of a file for editing, and write them afterwards. The file is locked against other commands
    meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".lock").touch(0o600)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(read_keys(path)) if path.exists() else []
        yield keys
        # Fields without a value are left out. A key's role is always written, for who reads the file.
        tables = [
            {name: value for name, value in msgspec.to_builtins(key).items() if name == "role" or value} for key in keys
        ]
        write_whole(path, tomli_w.dumps({"keys": tables}), durable=True, mode=0o600)


def _add(args: argparse.Namespace) -> None:
    """`journeywork keys add`: make a key, add it to the file, and print it once, to standard error."""
    key, settings = _new_key(args)
    path = _path(args)
    with _editing(path) as keys:
        keys.append(settings)
    sys.stderr.write(f"the key, which is shown only once: {key}\n")
    sys.stdout.write(f"added {args.name} ({settings.role}) to {path}\n")


def _revoke(args: argparse.Namespace) -> None:
    """`journeywork keys revoke`: remove keys from the file. Exits with 1 if no key matches, or several match a hash."""
    if not (args.name or args.sha256):
        raise ConfigError("--name or --sha256 is empty: say which keys to remove (`journeywork keys list`)")
    path = _path(args)
    if not path.exists():
        raise ConfigError(f"there is no file {path}")
    with _editing(path) as keys:
        matching = [k for k in keys if (name_of(k) == args.name if args.name else k.sha256.startswith(args.sha256))]
        if not matching or (args.sha256 and len(matching) > 1):
            sys.stderr.write(f"journeywork keys: {len(matching)} keys in {path} match {args.name or args.sha256!r}\n")
            raise SystemExit(1)
        keys[:] = [key for key in keys if key not in matching]
    sys.stdout.write(f"revoked {len(matching)} in {path}\n")


def _list(args: argparse.Namespace) -> None:
    """`journeywork keys list`: print a line for each key in the file."""
    path = _path(args)
    if not path.exists():
        sys.stderr.write(f"no keys: there is no file {path}\n")
        return
    for key in read_keys(path):
        scope = [*key.models, *(["calls only"] if key.calls_only else [])]
        columns = (
            name_of(key),
            key.role,
            key.sha256[:12],
            ", ".join(scope),
            f"{key.calls_per_minute}/min" if key.calls_per_minute else "",
            f"until {key.expires}" if key.expires else "",
            "EXPIRED" if expires_at(key) <= time.time() else "",
        )
        sys.stdout.write("  ".join(column for column in columns if column) + "\n")


if __name__ == "__main__":
    main()
