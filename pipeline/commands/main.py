"""The `journeywork` command.

    journeywork up [--config FILE] [--set section.key=value]…   run the whole installation
    journeywork status                                          processes, stream lag, policy versions
    journeywork sql "SELECT …"                                  query the history

`up` lives here; every other command is a module of the folder that owns it, run by name, so that the
backbone imports no service.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

import anyio
import anyio.abc
import msgspec
from rich.markup import escape

from pipeline import streams
from pipeline.commands import status
from pipeline.commands.modules import SDK, run_module
from pipeline.config import Config, ConfigError, load, save
from pipeline.config.checks import check
from pipeline.errors import leaves
from pipeline.log import memory
from pipeline.log.broker import Broker, BrokerError
from pipeline.running import environment, folder_lock
from pipeline.running.installations import find_installation, require_same_bases
from pipeline.running.plan import SERVICES, ProcessSpec, make_plan, nats_command, require_base_files, vllm_command
from pipeline.running.ports import check_ports, http_url
from pipeline.running.supervisor import Supervisor, SupervisorError, Watched
from pipeline.security import signing
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides
from pipeline.terminal.printing import Output, visible

_HERE = "pipeline.commands.main"
GROUPS = {
    "Start": {
        "init": SDK["init"],
        "check-model": ("trainer.commands.check_model", "check whether a base model trains correctly on this machine"),
        "up": (_HERE, "start everything and keep it running"),
        "prepare": ("pipeline.commands.prepare", "make keys and settings of a run, for containers"),
        "provision": (_HERE, "create streams, consumers and buckets on your own NATS server"),
        "exec": (_HERE, "run the NATS or vLLM server that `up` would start, for containers"),
        "sampler": ("rollout_gateway.sampler", "load adapters into the inference servers beside it"),
    },
    "Look": {
        "status": (_HERE, "processes, stream lag, policy versions, alarms"),
        "ui": ("store.showing.dashboard.command", "show the history and the decisions as web pages"),
        "sql": ("store.reading.sql", "query the history with SQL"),
        "dead": ("pipeline.commands.dead_letters", "list, show, retry or drop dead letters"),
        "docs": ("store.docs", "write the reference: settings, events, streams, views, alarms"),
    },
    "Teach": {
        "judge": ("judge.commands.main", "measure a judge (judge eval) or score one group (judge score)"),
        "rejudge": ("judge.commands.rejudge", "score history again as a new verdict set"),
        "diff": ("store.commands.diff", "compare two verdict sets"),
        "dataset": ("store.datasets.command", "write runs of the history as files for supervised trainers"),
        "train": ("trainer.commands.train", "run the trainer alone"),
        "apprentice": ("pipeline.commands.apprentice", "train a policy on the best runs of an outside model"),
        "prompt": SDK["prompt"],
        "replay": ("store.commands.replay", "rebuild groups from history onto a branch"),
        "what-if": ("store.commands.what_if", "train and evaluate history under other settings, beside main"),
    },
    "Decide": {
        "eval": SDK["eval"],
        "policy": ("rollout_gateway.serving.command", "decide which version a model's name stands for, or list it"),
        "decide": ("store.evidence.decide", "compare two versions in use, and promote the better one"),
    },
    "Keep": {
        "keys": ("rollout_gateway.access.command", "add, revoke and list the gateway's API keys"),
        "export": ("trainer.commands.export", "write an adapter or merged weights"),
        "backup": ("pipeline.commands.backup", "copy a stopped installation: log, lake, checkpoints and keys"),
        "restore": ("pipeline.commands.restore", "make a run directory of a backup"),
        "erase": ("store.erasure.command", "delete a person's runs from log, lake and data sets"),
    },
}
"""All commands, by what they are for: module, and what `--help` says."""

OWN, SUBCOMMANDS = (
    {name: command for group in GROUPS.values() for name, command in group.items() if (command[0] == _HERE) == here}
    for here in (True, False)
)
"""Commands of this module, and those that live in another folder."""

console = Output(highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits 0, 1 on a failure, 2 on bad usage or settings."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in SUBCOMMANDS:
        module, _ = SUBCOMMANDS[args[0]]
        run_module(module, args[1:])
    parser = _parser()
    if not args:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if not args[0].startswith("-") and args[0] not in (*OWN, *SUBCOMMANDS):
        near = difflib.get_close_matches(args[0], (*OWN, *SUBCOMMANDS), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        parser.exit(2, f"journeywork: there is no command {args[0]!r}{hint} `journeywork --help` lists all commands\n")
    parsed = parser.parse_args(args)
    try:
        parsed.run(parsed)
    except (ConfigError, BrokerError, SupervisorError) as error:
        sys.stderr.write(f"journeywork: {error}\n")
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from error


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the commands of this module. Its help lists all commands."""
    command_lists = [
        f"{title}:\n" + "".join(f"  {name:<13}{text}\n" for name, (_, text) in group.items())
        for title, group in GROUPS.items()
    ]
    parser = argparse.ArgumentParser(
        prog="journeywork",
        usage="%(prog)s COMMAND [--help] …",
        description="On-the-job training for LLM agents.\n\n" + "\n".join(command_lists),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"journeywork {version('journeywork')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="journeywork", help=argparse.SUPPRESS)
    settings = argparse.ArgumentParser(add_help=False)
    settings.add_argument("--config", help="settings, TOML")
    add_overrides(settings)

    up = commands.add_parser(
        "up",
        parents=[settings],
        description=inspect.cleandoc(_up.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    up.add_argument("--run-dir", help="where logs, state, checkpoints and history go; default: runs/default")
    up.add_argument("--nats-url", help="a NATS server that runs already")
    up.add_argument("--vllm-url", action="append", default=[], help="a vLLM server that runs already; may be repeated")
    up.add_argument("--services", default=",".join(SERVICES), help=f"comma-separated; default: {','.join(SERVICES)}")
    up.add_argument("--dry-run", action="store_true", help="print the resolved settings and commands, start nothing")
    up.set_defaults(run=_up)

    show = commands.add_parser("status", description=OWN["status"][1])
    show.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=lambda args: status.show(find_installation(args.run_dir), console, as_json=args.json))

    provision = commands.add_parser("provision", parents=[settings], description=OWN["provision"][1])
    provision.set_defaults(run=_provision)

    server = commands.add_parser("exec", description=OWN["exec"][1])
    server.add_argument("server", choices=("nats", "vllm"))
    server.add_argument("--config", required=True)
    server.add_argument("--host", default="0.0.0.0")  # noqa: S104 - inside a container's own network
    server.add_argument("--port", type=int, required=True)
    server.set_defaults(run=_exec)

    return parser


# -- up ------------------------------------------------------------------------------------------------------------


def _up(args: argparse.Namespace) -> None:
    """Start everything on this machine and keep it running: the log (NATS), vLLM, gateway, sampler, judge, trainer,
    store, ui (the dashboard), and telemetry (if a backend of traces is configured). Ctrl-C stops it in order; the same
    command goes on where it stopped.

    A policy needs a name and a base model, as settings or in a file (--config):

        journeywork check-model /models/Qwen3-4B            # can it be trained here?
        journeywork up --set models.0.name=support --set models.0.base=/models/Qwen3-4B --set gateway.port=8700

    When all is ready, it prints the addresses of the gateway, the base URL of your agents, and of the dashboard. Both
    listen on 127.0.0.1 alone (gateway.host, ui.host); the gateway on gateway.port (0: any free one), the dashboard on
    ui.port (8701). Then send your agents' calls there (docs/install.md#tutorial), and look with `journeywork status`.
    """
    # Settings are checked and processes planned before anything starts. With `--dry-run` the plan is printed only.
    config = load(args.config, args.overrides)
    nats, vllm = config.nats, config.vllm
    config = config.replace(
        run_dir=args.run_dir or config.run_dir,
        nats=nats.replace(url=args.nats_url) if args.nats_url else nats,
        vllm=vllm.replace(urls=args.vllm_url) if args.vllm_url else vllm,
    )
    check(config)
    services = tuple(s for s in args.services.split(",") if s)
    if unknown := set(services) - set(SERVICES):
        raise ConfigError(f"no service {', '.join(sorted(unknown))}; there are: {', '.join(SERVICES)}")
    # `planned`: the settings as the services get them, with the addresses of what is started.
    planned, specs = make_plan(config, services)
    if args.dry_run:
        console.print_json(msgspec.json.encode(planned).decode())
        for spec in specs:
            console.print(f"[bold]{spec.name}[/] {escape(' '.join(spec.argv))}", soft_wrap=True)
        _check_by_services(config, planned, specs)
        return
    environment.require_variables(config, services, os.environ)
    require_base_files(config, services)
    os.umask(0o077)  # only the owner may read a run's files
    folder_lock.make_private(Path(config.run_dir))
    log_file = config.path("logs", "supervisor.log")
    with folder_lock.lock_exclusively(Path(config.run_dir)) as lock:
        require_same_bases(config)
        _check_by_services(config, planned, specs)
        check_ports(planned, [spec.name for spec in specs])
        planned = planned.replace(signing=signing.trusting_own_key(planned.signing))
        log_file.parent.mkdir(parents=True, exist_ok=True)
        sink = log_file.open("a", encoding="utf-8")
        try:
            # Every child inherits the lock: the directory is free only when all have ended, also if `up` is killed.
            supervisor = Supervisor(planned, specs, on_change=_print_state, inherit=(lock,))
            _run_supervisor(planned, services, supervisor, sink)
        finally:
            with suppress(OSError):  # the disk may be full: the last lines are lost, the order of the stop is not
                sink.close()


def _check_by_services(config: Config, planned: Config, specs: Sequence[ProcessSpec]) -> None:
    """Let every service check its settings, by `python -m <service> --check`: this module imports none of them.
    `config`: the settings as given, `planned`: as the services will get them. Raises `ConfigError` with what they
    say."""
    # What a start makes does not exist yet: the key of the inference server, and the public key of the trainer.
    check = planned.signing.check
    before = planned.replace(
        vllm=planned.vllm.replace(api_key_file=config.vllm.api_key_file),
        signing=planned.signing.replace(check="auto" if check == "require" and planned.signing.seed else check),
    )
    with TemporaryDirectory() as folder, ExitStack() as running:
        file = Path(folder, "config.toml")
        save(before, file)
        checks = {}
        for spec in specs:
            module = SERVICES.get(spec.name, "trainer")
            if module == "trainer":
                continue  # `load` checked all that can be checked without loading a model
            argv = [sys.executable, "-m", module, "--config", str(file), "--check"]
            env = environment.environment_of(config, spec.name, os.environ)
            process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            checks[spec.name] = running.enter_context(process)
        errors = {name: process.communicate()[1].strip() for name, process in checks.items()}
    refusals = [f"{name}: {errors[name]}" for name, process in checks.items() if process.returncode]
    if refusals:
        raise ConfigError("\n".join(refusals))


def _run_supervisor(config: Config, services: Sequence[str], supervisor: Supervisor, sink: TextIO) -> None:
    """Run the supervisor until it is stopped; its log goes to `sink`. Raises `SupervisorError` with the messages of all
    errors that ended it."""
    logs.configure("supervisor", config.log_level, sink)
    try:
        anyio.run(_supervise, config, services, supervisor)
    except* (ConfigError, SupervisorError, BrokerError) as group:
        raise SupervisorError("\n".join(map(str, leaves(group)))) from None
    finally:
        logs.configure("supervisor", config.log_level)


def _exec(args: argparse.Namespace) -> None:
    """Replace this process by the NATS or vLLM server that `up` would start with these settings, on the host and port
    of the arguments."""
    make_spec = nats_command if args.server == "nats" else vllm_command
    config = load(args.config)
    if args.server == "vllm":
        require_base_files(config, ("trainer",))
    spec = make_spec(config, args.port, args.host)
    os.umask(0o077)
    folder_lock.make_private(Path(config.run_dir))
    folder_lock.lock_for_server(Path(config.run_dir), args.server)
    if spec.prepare is not None:
        spec.prepare()
    os.execve(spec.argv[0], list(spec.argv), spec.environment(config))  # noqa: S606 - no shell on purpose


def _provision(args: argparse.Namespace) -> None:
    """Create streams, consumers and buckets on the NATS server of the settings."""
    config = load(args.config, args.overrides)
    if not config.nats.url:
        raise ConfigError("nats.url is not set: name the server. `journeywork up` provisions the server that it starts")
    logs.configure("provision", "ERROR")  # an error is printed as one line
    nats = config.nats.replace(provision=True)

    async def connect_and_provision() -> None:
        # With `provision`, connecting makes streams, consumers and buckets. The trainer's consumer is extra: on a
        # branch other than `main` its name is made of the branch.
        async with Broker.connect(nats, name="provision") as broker:
            await broker.provision_consumer(streams.trainer_consumer(config.trainer.branch))

    anyio.run(connect_and_provision)
    console.print(f"provisioned {config.nats.address}", markup=False)


async def _supervise(config: Config, services: Sequence[str], supervisor: Supervisor) -> None:
    """Run the supervisor until it ends, and show what it does. The first SIGTERM or SIGINT stops the processes in
    order, the second one at once."""
    async with anyio.create_task_group() as tg:

        async def stop_on_signal() -> None:
            is_stopping = False
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    if is_stopping:
                        console.print("stopping at once")
                        tg.cancel_scope.cancel()
                        return
                    is_stopping = True
                    console.print("stopping in order; once more stops at once")
                    supervisor.stop()

        tg.start_soon(stop_on_signal)

        async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            await supervisor.run(task_status=task_status)
            tg.cancel_scope.cancel()

        await tg.start(run)
        ready = f"[bold green]ready[/] {_what_to_do_next(config, services)} (run directory {escape(config.run_dir)})"
        console.print(ready, soft_wrap=True)
        if "ui" in supervisor.watched:
            console.print(f"the dashboard is at [bold]{escape(http_url(config.ui.host, config.ui.port))}[/]")
            console.print("`journeywork status` tells the state of the run")
        console.print(memory.retention(config.nats), soft_wrap=True)
        for alarm in supervisor.alarms:
            console.print(f"[bold red]alarm[/] {escape(alarm)}")


def _what_to_do_next(config: Config, services: Sequence[str]) -> str:
    """Return what a user can do now that `services` run: the gateway's address for agents, else that of the log. For
    rich's markup."""
    if "gateway" in services:
        url = escape(http_url(config.gateway.host, config.gateway.port))
        return f"point your agents at [bold]{url}/v1[/]"
    address = escape(config.nats.address)
    return f"{', '.join(services) or 'nats'}, on the log at [bold]{address}[/]; no gateway was started"


def _print_state(watched: Watched) -> None:
    """Print the state of a process, and the errors in its log that come with it. The supervisor calls it at each
    change.
    """
    console.print(f"{watched.spec.name:<10} {watched.state:<9} pid {watched.pid}")
    for error in watched.errors:
        console.print(f"[bold red]{watched.spec.name}[/] {escape(visible(error))}")


if __name__ == "__main__":
    main()
