"""Let results decide between two versions: `journeywork decide`.

    journeywork decide begin support@12 support@10 --percent 20 --metric reward
    journeywork decide begin support@12 support@10 --percent 50 --metric "feedback['stars']" \\
        --guard "sampled_tokens:0:2000:higher:100" --approval
    journeywork decide watch support            looks until it is decided; --once: one look
    journeywork decide approve support          what a person who is asked for it says
    journeywork decide check                    computes every decision again from the store

`begin` splits the runs of the model between the candidate and the control. `watch` compares the results at each look:
it promotes the candidate once it is shown to be better and no guard to be broken, routes all runs to the control once
the candidate is shown to be worse, and to the control too at the end of the plan. It may be ended and started again at
any time. docs/operations.md says what the numbers promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from pipeline.config import Config, ConfigError
from pipeline.names import new_id, parse_version
from pipeline.running.gateway_api import GatewayApi, GatewayError, add_arguments, connect, say_what_is_awaited
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible
from store.evidence.comparison import Evidence, Finding, Guard, Metric, Plan, read_evidence
from store.reading import sql
from store.reading.options import exit_status

_SETTLED_S = 30
"""How long the store may take to have an event. What is younger is left for the next look."""
_RECORDED = """
SELECT model, evidence FROM policy_promoted WHERE project = ? AND evidence <> '' AND other = '' ORDER BY "at"
"""
"""The decisions that ended a comparison. The one that begins it has `other`, the control."""


class _Begun(msgspec.Struct, frozen=True):
    """The comparison that is in force for a model."""

    evidence: Evidence
    request: str
    """Id of the decision that began it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 if `check` finds a difference, 3 if `watch` has not decided, or an error's status
    (`exit_status`)."""
    args = _parser().parse_args(argv)
    return exit_status("decide", lambda: int(args.run(args)), GatewayError)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("decide", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    add_arguments(common)

    begin = commands.add_parser("begin", parents=[common], help="divide runs between two versions, by a plan")
    begin.add_argument("candidate", help="exact version that may be promoted, such as support@12")
    begin.add_argument("control", help="exact version that stays if nothing is shown")
    begin.add_argument("--percent", type=float, required=True, help="of the runs, for the candidate: 5 to 95")
    begin.add_argument("--metric", required=True, help="SQL expression over a run: reward, feedback['stars'], …")
    begin.add_argument("--range", type=float, nargs=2, default=(0.0, 1.0), metavar=("LOW", "HIGH"))
    begin.add_argument("--lower-is-better", action="store_true", help="of the metric")
    begin.add_argument(
        "--guard",
        action="append",
        default=[],
        metavar="SQL:LOW:HIGH:higher|lower:MARGIN",
        help="a number that may not become worse (higher or lower) by more than MARGIN",
    )
    begin.add_argument(
        "--deadline",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="a run without a value so long after its opening is late; default: 3600",
    )
    begin.add_argument(
        "--late",
        type=float,
        metavar="VALUE",
        help="of the metric, for late runs; default: the worse end of the range for what would be decided",
    )
    begin.add_argument("--alpha", type=float, default=0.05, help="default: 0.05")
    begin.add_argument("--max-pairs", type=int, default=5000, help="default: 5000")
    begin.add_argument("--approval", action="store_true", help="a person has to agree to a promotion")
    begin.set_defaults(run=_begin)

    watch = commands.add_parser("watch", parents=[common], help="look at the results until it is decided")
    watch.add_argument("model")
    watch.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="default: 60")
    watch.add_argument("--once", action="store_true", help="one look; exit status 3 if it goes on")
    watch.set_defaults(run=_watch)

    approve = commands.add_parser("approve", parents=[common], help="agree to a promotion that is shown")
    approve.add_argument("model")
    approve.add_argument("--by", default="", help="who agrees; with API keys, the key's name is recorded")
    approve.set_defaults(run=_approve)

    check = commands.add_parser("check", help="compute every decision again from the store")
    check.add_argument("--run-dir", help="default: the running one under runs/, else the newest")
    check.set_defaults(run=_check)
    return parser


def _parse_guard(text: str) -> Guard:
    """Read a guard of the command line. It is cut at its last four colons, since SQL may hold colons. Raises
    `ConfigError`."""
    form = f"--guard {text!r} is not SQL:LOW:HIGH:higher|lower:MARGIN, such as sampled_tokens:0:2000:higher:100"
    names, parts = ("sql", "low", "high", "worse", "margin"), text.rsplit(":", 4)
    if len(parts) < len(names):
        raise ConfigError(form)
    try:
        return msgspec.convert(dict(zip(names, parts, strict=True)), Guard, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{form}: {error}") from error


def _begin(args: argparse.Namespace) -> int:
    if not 5 <= args.percent <= 95:
        raise ConfigError(f"--percent is {args.percent:g}: give from 5 to 95, both versions need runs")
    low, high = args.range
    expression, late = args.metric, args.late
    if args.lower_is_better:
        expression, late = f"{low + high} - ({expression})", None if late is None else low + high - late
    plan = Plan(
        metric=Metric(sql=expression, low=low, high=high, late=late),
        guards=tuple(map(_parse_guard, args.guard)),
        alpha=args.alpha,
        deadline_s=args.deadline,
        max_pairs=args.max_pairs,
        approval=args.approval,
    )
    begun = Evidence(plan=plan, candidate=args.candidate, control=args.control, percent=args.percent, since=0, until=0)
    try:
        msgspec.json.decode(msgspec.json.encode(begun), type=Evidence)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the comparison can't be used: {error}") from error
    model = parse_version(args.candidate)[0]
    if parse_version(args.control)[0] != model or args.control == args.candidate:
        raise ConfigError(f"{args.candidate} and {args.control} must be two versions of one model")
    config = installation_settings(args.run_dir, sections=("store",))
    # An expression that DuckDB refuses begins nothing.
    read_evidence(sql.connect(config), config.project, begun, 0)
    body = {
        "version": args.candidate,
        "other": args.control,
        "percent": args.percent,
        "request": new_id("compare"),
        "evidence": msgspec.json.encode(begun).decode(),
        "reason": f"compared by {args.metric}",
    }
    gateway = connect(args)
    say_what_is_awaited(args.candidate, args.control)
    gateway.ask("POST", _path(model, "split"), body)
    sys.stdout.write(
        visible(f"begun: {args.candidate} against {args.control}; now: journeywork decide watch {model}\n")
    )
    return 0


def _watch(args: argparse.Namespace) -> int:
    gateway, config = connect(args), installation_settings(args.run_dir, sections=("store",))
    while True:
        begun = _in_force(gateway, args.model)
        evidence = _read_until_now(config, begun)
        _say(evidence)
        awaited = evidence.verdict == "promote" and evidence.plan.approval
        if awaited:
            sys.stdout.write(f"it waits for `journeywork decide approve {args.model}`\n")
        sys.stdout.flush()  # a pipe would keep the lines of many looks
        if not awaited and evidence.verdict != "continue":
            _publish(gateway, begun, evidence)
            return 0
        if args.once:
            return 3
        time.sleep(args.every)


def _approve(args: argparse.Namespace) -> int:
    gateway, config = connect(args), installation_settings(args.run_dir, sections=("store",))
    begun = _in_force(gateway, args.model)
    evidence = _read_until_now(config, begun)
    _say(evidence)
    if evidence.verdict != "promote":
        raise ConfigError(f"{evidence.candidate} is not shown to be better: the verdict is {evidence.verdict}")
    _publish(gateway, begun, evidence, args.by)
    return 0


def _check(args: argparse.Namespace) -> int:
    """Compute every decision again, exactly: the same runs in the same order give the same floats. Decisions may differ
    rightly where runs were erased or are older than `store.keep_days`, or came to the store late (`_SETTLED_S`)."""
    config = installation_settings(args.run_dir, sections=("store",))
    connection = sql.connect(config)
    different = 0
    decisions = connection.execute(_RECORDED, [config.project]).fetchall()
    for model, text in decisions:
        recorded = msgspec.json.decode(text, type=Evidence)
        again = read_evidence(connection, config.project, recorded, recorded.until)
        different += again != recorded
        now = msgspec.json.encode(again).decode()
        said = "equal" if again == recorded else f"DIFFERENT: recorded {text}, now {now}"
        sys.stdout.write(visible(f"{model}: {recorded.verdict} of {recorded.candidate}: {said}") + "\n")
    sys.stdout.write(f"{len(decisions)} decisions, {different} different\n")
    return 1 if different else 0


def _path(model: str, action: str) -> str:
    return f"/v1/policies/{quote(model, safe='')}/{action}"


def _in_force(gateway: GatewayApi, model: str) -> _Begun:
    """Return the comparison in force. Raises `ConfigError` if there is none."""
    policies = {p["model"]: p for p in gateway.ask("GET", "/v1/policies")["data"]}
    decision = (policies.get(model) or {}).get("decision") or {}
    if decision.get("action") != "split" or not decision.get("evidence"):
        why = f"the last decision is {decision['action']}" if decision else "there was no decision"
        raise ConfigError(f"no comparison of {model} is in force, {why}: journeywork decide begin")
    evidence = msgspec.json.decode(decision["evidence"], type=Evidence)
    return _Begun(msgspec.structs.replace(evidence, since=decision["at"]), decision["request"])


def _read_until_now(config: Config, begun: _Begun) -> Evidence:
    until = int((time.time() - _SETTLED_S) * 1e6)
    return read_evidence(sql.connect(config), config.project, begun.evidence, until)


def _publish(gateway: GatewayApi, begun: _Begun, evidence: Evidence, by: str = "") -> None:
    """Decide, once: whoever comes second, also after a kill, finds that it is decided."""
    version = evidence.candidate if evidence.verdict == "promote" else evidence.control
    body = {
        "version": version,
        "by": by,
        "reason": _line(evidence.plan.metric.sql, evidence.findings[0]),
        "evidence": msgspec.json.encode(evidence).decode(),
        "request": f"{begun.request}-decided",
    }
    say_what_is_awaited(version)
    try:
        gateway.ask("POST", _path(parse_version(version)[0], "promote"), body)
    except GatewayError as error:
        if error.code != "request_exists":
            raise
        sys.stdout.write("another watcher has decided it already\n")
        return
    sys.stdout.write(visible(f"{evidence.verdict}: runs go to {version}\n"))


def _say(evidence: Evidence) -> None:
    for metric, finding in zip((evidence.plan.metric, *evidence.plan.guards), evidence.findings, strict=True):
        sys.stdout.write(visible(_line(metric.sql, finding)) + "\n")
    sys.stdout.write(f"verdict: {evidence.verdict}\n")


def _line(name: str, finding: Finding) -> str:
    runs = f"{finding.candidate_runs} and {finding.control_runs} runs, {finding.pairs} pairs"
    if finding.candidate_late or finding.control_late:
        runs += f", {finding.candidate_late} and {finding.control_late} late"
    if finding.difference is None:
        return f"{name}: no pair yet ({runs})"
    return (
        f"{name}: {finding.candidate_mean:.4g} against {finding.control_mean:.4g}, difference "
        f"{finding.difference:+.4g} [{finding.low:+.4g}, {finding.high:+.4g}] ({runs})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
