"""Make, list and revoke API keys: `journeyman keys`. A gateway that runs takes a change within a second or two.

    journeyman keys add --name ci --model support --expires 30d     the key goes to standard error, its hash into the file
    journeyman keys revoke --name ci
    journeyman keys list
    journeyman keys make --name ci                                  the same as settings, for a file of your own

The file is `keys.toml` in the run directory (`gateway.keys_file`). It holds hashes only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import tomli_w

from pipeline.cli import newest_run
from pipeline.config import ConfigError, GatewayConfig, KeyConfig
from pipeline.names import InvalidNameError, check_name
from rollout_gateway.access.api_keys import ends_at, name_of, read_keys

PREFIX = "jm-"
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def main(argv: Sequence[str] | None = None) -> None:
    """Exits 2 on bad usage and 1 where there is nothing to revoke."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except ConfigError as error:
        sys.stderr.write(f"journeyman keys: {error}\n")
        raise SystemExit(2) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="journeyman keys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("add", _add, "make a key and put it into the file"),
        ("make", _make, "make a key and print the settings that know it"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--name", required=True, help="what it opens belongs to this name")
        command.add_argument("--role", choices=("agent", "operator"), default="agent")
        command.add_argument("--calls-per-minute", type=int, default=0)
        command.add_argument("--model", action="append", default=[], help="may be repeated; default: all")
        command.add_argument("--project", action="append", default=[], help="may be repeated; default: all")
        command.add_argument("--calls-only", action="store_true", help="it can't open, read or complete runs")
        command.add_argument(
            "--expires", default="", help="30m, 12h, 30d, 2w from now, or a date and time in ISO 8601"
        )
        command.set_defaults(run=run)
        if name == "add":
            _where(command)
    revoke = commands.add_parser("revoke", help="take keys out of the file")
    which = revoke.add_mutually_exclusive_group(required=True)
    which.add_argument("--name", help="all keys of this name")
    which.add_argument("--sha256", help="the key whose hash begins with this")
    _where(revoke)
    revoke.set_defaults(run=_revoke)
    listing = commands.add_parser("list", help="what the file holds")
    _where(listing)
    listing.set_defaults(run=_list)
    return parser


def _where(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run-dir", type=Path, help="default: the newest under runs/")
    command.add_argument("--file", type=Path, help="the file itself, wherever it is")


def _file(args: argparse.Namespace) -> Path:
    if args.file is not None:
        return Path(args.file)
    return Path(args.run_dir or newest_run()) / GatewayConfig().keys_file


def _made(args: argparse.Namespace) -> tuple[str, KeyConfig]:
    """A fresh key and the settings that know it."""
    try:
        check_name(args.name)
    except InvalidNameError as error:
        raise ConfigError(f"--name: {error}") from error
    if args.calls_per_minute < 0:
        raise ConfigError(f"--calls-per-minute is {args.calls_per_minute}: it is 0 (no limit) or more")
    key = PREFIX + secrets.token_urlsafe(32)
    return key, KeyConfig(
        sha256=hashlib.sha256(key.encode()).hexdigest(),
        name=args.name,
        role=args.role,
        calls_per_minute=args.calls_per_minute,
        models=tuple(args.model),
        projects=tuple(args.project),
        calls_only=args.calls_only,
        expires=_end(args.expires) if args.expires else "",
    )


def _end(text: str) -> str:
    """When a key ends, as the file has it. Raises `ConfigError` for what is no moment, or one that is over."""
    span = re.fullmatch(r"([0-9]+)([mhdw])", text)
    now = datetime.now(UTC)
    try:
        if span is not None:
            end = now + timedelta(**{_UNITS[span[2]]: int(span[1])})
            text = end.isoformat(timespec="seconds")
        else:
            end = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--expires {text!r} is not understood: give minutes, hours, days or weeks from now (30m, 12h, 30d, 2w), or a date "
            "and time in ISO 8601 (2030-01-31 or 2030-01-31T12:00:00+01:00; UTC where no offset is given)"
        ) from error
    if (end if end.tzinfo else end.replace(tzinfo=UTC)) <= now:
        raise ConfigError(f"--expires {text!r} is in the past: the key would never be good")
    return text


def _table(key: KeyConfig) -> dict[str, object]:
    """As TOML has it, without what is left at its default."""
    told: dict[str, object] = msgspec.to_builtins(key)
    return {name: value for name, value in told.items() if name in ("sha256", "name", "role") or value}


@contextmanager
def _changing(path: Path) -> Iterator[list[KeyConfig]]:
    """The keys of a file, to be changed: locked against another command, written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".lock").touch(0o600)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(read_keys(path)) if path.exists() else []
        yield keys
        _write(path, keys)


def _write(path: Path, keys: Iterable[KeyConfig]) -> None:
    temporary = path.with_suffix(f".{secrets.token_hex(4)}")
    temporary.touch(0o600)
    with temporary.open("w", encoding="utf-8") as out:
        out.write(tomli_w.dumps({"keys": [_table(key) for key in keys]}))
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)


def _add(args: argparse.Namespace) -> None:
    key, made = _made(args)
    path = _file(args)
    with _changing(path) as keys:
        keys.append(made)
    sys.stderr.write(f"the key, shown this once: {key}\n")
    sys.stdout.write(f"added {args.name} ({made.role}) to {path}\n")


def _make(args: argparse.Namespace) -> None:
    key, made = _made(args)
    sys.stderr.write(f"the key, shown this once: {key}\n")
    sys.stdout.write("[[gateway.keys]]\n" + tomli_w.dumps(_table(made)))


def _revoke(args: argparse.Namespace) -> None:
    path = _file(args)
    with _changing(path) as keys:
        going = [
            k for k in keys if (name_of(k) == args.name if args.name else k.sha256.startswith(args.sha256))
        ]
        if not going or (args.sha256 and len(going) > 1):
            what = args.name or args.sha256
            sys.stderr.write(f"journeyman keys: {len(going)} keys of {path} match {what!r}\n")
            raise SystemExit(1)
        keys[:] = [key for key in keys if key not in going]
    sys.stdout.write(f"revoked {len(going)} in {path}\n")


def _list(args: argparse.Namespace) -> None:
    path = _file(args)
    for key in read_keys(path) if path.exists() else ():
        scope = [
            *key.models,
            *(f"project {p}" for p in key.projects),
            *(["calls only"] if key.calls_only else []),
        ]
        end = f"until {key.expires}" if key.expires else ""
        ended = "EXPIRED" if ends_at(key) <= time.time() else ""
        rate = f"{key.calls_per_minute}/min" if key.calls_per_minute else ""
        words = (name_of(key), key.role, key.sha256[:12], ", ".join(scope), rate, end, ended)
        sys.stdout.write("  ".join(word for word in words if word) + "\n")


if __name__ == "__main__":
    main()
