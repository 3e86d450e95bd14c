"""`journeywork dead`: messages that a consumer or reader could not use, and what to do with them.

    journeywork dead list [--json]          list the letters with their reasons
    journeywork dead show 12                show one letter, its payload decoded if possible
    journeywork dead retry 12 13 | --all    deliver letters again to the consumer that gave them up
    journeywork dead drop 12 | --all        delete letters from the list; the store keeps them

A retry publishes the payload under a subject of its own, marked for the one consumer that failed: no other consumer
gets it twice, and a repeated retry is one message. If it fails again, that is a new letter. A letter of consumer
`reader` names a message that a read without a consumer skipped. Readers meet that message again at each start, so
`retry` and `drop` only delete the letter; it comes back for as long as the stream holds the message and it cannot be
decoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.config import ConfigError
from pipeline.events import DeadLettered, decode
from pipeline.log.broker import READER, Broker, BrokerError, LogEntry
from pipeline.running.installations import installation_settings, log_of
from pipeline.streams import RETRY_HEADER
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides, command_parser, exit_on_error
from pipeline.terminal.printing import visible

_PREVIEW = 2_000
"""Bytes of an undecodable payload that are shown."""


Letter = LogEntry[DeadLettered]


async def find(broker: Broker, seqs: Sequence[int]) -> list[Letter]:
    """Return the letters with these sequences in the stream DEAD. Raises `BrokerError` naming the first that does not
    exist."""
    letters = {letter.seq: letter for letter in await broker.read(DeadLettered)}
    for seq in seqs:
        if seq not in letters:
            raise BrokerError(f"there is no dead letter {seq}; see `journeywork dead list`")
    return [letters[seq] for seq in seqs]


async def retry(broker: Broker, letter: Letter) -> None:
    """Give a letter back to the consumer that could not use it, then drop it; safe to repeat."""
    event = letter.event
    if event.consumer != READER:
        headers = {k: v for k, v in event.headers.items() if not k.startswith("Nats-") and k != RETRY_HEADER}
        seq, at = letter.place
        await broker.publish_raw(
            f"{event.original_subject}.retry-{seq}-{at}", event.payload, headers | {RETRY_HEADER: event.consumer}
        )
    await drop(broker, letter)


async def drop(broker: Broker, letter: Letter) -> None:
    """Delete a letter from the list; the store keeps what it wrote of it. Safe to repeat."""
    await broker.delete(letter.stream, letter.seq)


def describe(letter: Letter) -> dict[str, Any]:
    """Return a letter as plain values: its sequence in DEAD, the fields of its event, and in place of the payload its
    size in bytes and the event in it, or the beginning of what can't be decoded and why."""
    payload = letter.event.payload
    fields: dict[str, Any] = {"seq": letter.seq, **msgspec.to_builtins(letter.event), "bytes": len(payload)}
    del fields["payload"]
    try:
        fields["event"] = msgspec.to_builtins(decode(payload))
    except msgspec.DecodeError as error:
        fields["undecodable"] = str(error)
        fields["payload"] = payload[:_PREVIEW].decode("utf-8", "backslashreplace")
    return fields


# -- the command ---------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command, with its subcommands `list`, `show`, `retry` and `drop`."""
    where = argparse.ArgumentParser(add_help=False)  # arguments that all subcommands take
    where.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    where.add_argument("--config", help="a settings file with nats.url")
    add_overrides(where)
    parser = command_parser("dead", "Messages that a consumer could not use, and why.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", parents=[where], help="list all letters").add_argument("--json", action="store_true")
    commands.add_parser("show", parents=[where], help="show one letter").add_argument("seqs", nargs=1, type=int)
    for name, text in (("retry", "deliver again to the consumer that failed"), ("drop", "delete from the list")):
        command = commands.add_parser(name, parents=[where], help=text)
        command.add_argument("seqs", nargs="*", type=int, metavar="SEQ")
        command.add_argument("--all", action="store_true")
    return parser


async def _run(args: argparse.Namespace) -> None:
    """Do what the arguments say over a connection to the log, and print it."""
    out = Console(highlight=False)
    config = installation_settings(args.run_dir, args.config, args.overrides, sections=("nats",))
    async with Broker.connect(log_of(config), name="dead", provision=False) as broker:
        if args.command == "list":
            letters = await broker.read(DeadLettered)
            if args.json:
                _print_json(out, [describe(letter) for letter in letters])
            else:
                out.print(_table(letters) if letters else "no dead letters")
        elif args.command == "show":
            (letter,) = await find(broker, args.seqs)
            _print_json(out, describe(letter))
        else:
            out.print(await _retry_or_drop(broker, args))


def _print_json(out: Console, described: Any) -> None:
    """Print letters as JSON. msgspec writes null for the NaN that may be in an event, which JSON does not have."""
    out.print_json(msgspec.json.encode(described).decode(), ensure_ascii=True)


def _table(letters: Sequence[Letter]) -> Table:
    """Return the list of letters for a terminal. Names and details may hold what agents wrote."""
    table = Table("seq", "from", "consumer", "reason", "deliveries", "detail", box=None)
    for letter in letters:
        event = letter.event
        message, detail = f"{event.stream} {event.stream_seq}", visible(event.detail[:80])
        cells = (letter.seq, message, event.consumer, event.reason, event.deliveries, detail)
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


async def _retry_or_drop(broker: Broker, args: argparse.Namespace) -> str:
    """Retry or drop the letters that the arguments name, or all. Return what was done, for the terminal."""
    if bool(args.seqs) == args.all:
        raise BrokerError(f"name the letters (journeywork dead {args.command} SEQ ...) or give --all, not both")
    letters = await broker.read(DeadLettered) if args.all else await find(broker, args.seqs)
    for letter in letters:
        await (retry if args.command == "retry" else drop)(broker, letter)
    return f"{len(letters)} {'retried' if args.command == 'retry' else 'dropped'}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Exits 0, 1 if the log or a letter is not there, 2 for unusable settings."""
    args = _parser().parse_args(argv)
    logs.configure("dead", "CRITICAL")  # an error is printed as one line
    with exit_on_error("dead", (ConfigError,), (BrokerError,)):
        anyio.run(_run, args)


if __name__ == "__main__":
    main()
