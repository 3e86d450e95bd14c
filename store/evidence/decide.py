"""Let results decide between two versions: `journeywork decide`.

    journeywork decide begin support@12 support@10 --percent 20 --metric reward
    journeywork decide begin support@12 support@10 --percent 50 --metric "feedback['stars']" \\
        --guard "sampled_tokens:0:2000:higher:100" --approval
    journeywork decide watch support            looks until it is decided; --once: one look
    journeywork decide approve support          what a person who is asked for it says
    journeywork decide check                    computes every decision again from the store

An apprentice takes over from an outside model, `master` say, in the same way, by steps:

    journeywork decide begin inbox@12 outside:master --steps 5,25 --metric reward --margin 0.05 \\
        --guard cost_usd:0:0.1:higher:0 --guard calls_s:0:120:higher:10
    journeywork decide watch master

`begin` splits the runs of the model between the candidate and the control. `watch` compares the results at each look:
it promotes the candidate once it is shown to be better and no guard to be broken, routes all runs to the control once
the candidate is shown to be worse, and also at the end of the plan. It may be ended and started again at any time.
docs/operations.md says what the numbers promise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import quote

import duckdb
import msgspec

from pipeline import crash
from pipeline.config import Config, ConfigError
from pipeline.names import is_outside, new_id, parse_version
from pipeline.running.gateway_api import GatewayApi, GatewayError, add_arguments, connect, say_what_is_awaited
from pipeline.running.installations import installation_settings
from pipeline.terminal.parsers import command_parser
from pipeline.terminal.printing import visible
from store.evidence.cascade import find_threshold
from store.evidence.comparison import Cascade, Evidence, Finding, Guard, Metric, Plan, Share, read_evidence
from store.reading import sql
from store.reading.options import run_command

T = TypeVar("T")

_SETTLED_S = 30
"""How long the store may take to have an event. Younger events are read at the next look."""
_RECORDED = """
SELECT model, evidence FROM policy_promoted
WHERE project = ? AND evidence <> '' AND (other = '' OR contains(evidence, '"verdict":"raise"')) ORDER BY "at"
"""
"""The decisions that rest on results. The one that begins a comparison has `other`, the control, and so has one that
raises a share."""


class _Begun(msgspec.Struct, frozen=True):
    """The comparison that is in force for a model."""

    evidence: Evidence
    request: str
    """Id of the decision that began it."""
    last: str
    """Id of the decision in force: that one, or the one that gave the present share."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, 1 if `check` finds a difference, 3 if `watch` has not decided, or an error's status
    (`run_command`)."""
    return run_command(_parser(), lambda args: int(args.run(args)), argv, GatewayError)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("decide", __doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    add_arguments(common)

    begin = commands.add_parser("begin", parents=[common], help="divide runs between two versions, by a plan")
    begin.add_argument("candidate", help="exact version that may be promoted, such as support@12")
    begin.add_argument("control", help="what stays if nothing is shown: an exact version, or outside:NAME")
    shares = begin.add_mutually_exclusive_group(required=True)
    shares.add_argument("--percent", type=float, help="of the runs, for the candidate: 5 to 95")
    shares.add_argument("--steps", help="shares of an apprentice that takes over, such as 5,25; all runs come last")
    begin.add_argument("--metric", required=True, help="SQL expression over a run: reward, 60 - calls_s, …")
    begin.add_argument("--range", type=float, nargs=2, default=(0.0, 1.0), metavar=("LOW", "HIGH"))
    begin.add_argument("--margin", type=float, default=0.0, help="by how much the metric may be worse; default: 0")
    begin.add_argument("--quality", type=float, help="show what agrees with the master so probably, by --pairs")
    begin.add_argument("--pairs", metavar="SQL", help="of each pair, the mean logprob and whether the answers agree")
    begin.add_argument(
        "--guard",
        action="append",
        default=[],
        metavar="SQL:LOW:HIGH:higher|lower:MARGIN",
        help="a number that may not become worse (higher or lower) by more than MARGIN",
    )
    begin.add_argument("--deadline", type=float, default=3600.0, metavar="SECONDS", help="until a run has a value")
    begin.add_argument("--late", type=float, metavar="VALUE", help="of later runs; default: the worse end of the range")
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
    """Check the plan, and divide the model's runs between the two versions by it."""
    steps = _parse_steps(args.steps) if args.steps else ()
    percent = steps[0] if steps else args.percent
    if not 5 <= percent <= 95:
        raise ConfigError(f"the candidate's share is {percent:g} %: give from 5 to 95, both versions need runs")
    config = installation_settings(args.run_dir, sections=("store", "models", "outside"))
    connection = sql.connect(config)
    low, high = args.range
    plan = Plan(
        metric=Metric(sql=args.metric, low=low, high=high, late=args.late),
        margin=args.margin,
        steps=steps,
        cascade=_find_cascade(args, connection),
        guards=tuple(map(_parse_guard, args.guard)),
        alpha=args.alpha,
        deadline_s=args.deadline,
        max_pairs=args.max_pairs,
        approval=args.approval,
    )
    begun = Evidence(plan=plan, candidate=args.candidate, control=args.control, shares=(Share(percent=percent),))
    try:  # msgspec checks bounds only as it decodes
        msgspec.json.decode(msgspec.json.encode(begun), type=Evidence)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the comparison can't be used: {error}") from error
    _require_versions_of_one_model(config, begun)
    # Up to time 0 there are no runs: DuckDB only checks the expressions, so that one that it refuses begins nothing.
    read_evidence(connection, config.project, begun, 0)
    body = {
        "version": args.candidate,
        "other": args.control,
        "percent": percent,
        "min_logprob": plan.cascade.min_logprob if plan.cascade else None,
        "request": new_id("compare"),
        "evidence": msgspec.json.encode(begun).decode(),
        "reason": f"compared by {args.metric}",
    }
    gateway = connect(args)
    say_what_is_awaited(args.candidate, args.control)  # the answer comes when the gateway has loaded both versions
    gateway.ask("POST", _policy_path(begun.model, "split"), body)
    sys.stdout.write(
        visible(f"begun: {args.candidate} against {args.control}; now: journeywork decide watch {begun.model}\n")
    )
    return 0


def _require_versions_of_one_model(config: Config, begun: Evidence) -> None:
    """Raise `ConfigError` unless the candidate and the control are versions of one model, or an apprentice's version
    and the outside model that it may take over from."""
    model, outside, plan = begun.model, is_outside(begun.control), begun.plan
    own = config.apprentices().get(model, "") if outside else model
    if parse_version(begun.candidate)[0] != own or begun.control == begun.candidate:
        raise ConfigError(
            f"{begun.candidate} is no version of the apprentice of {model}: {own or 'it has none (outside.apprentice)'}"
            if outside
            else f"{begun.candidate} and {begun.control} must be two versions of one model"
        )
    if not outside and (plan.steps or plan.cascade):
        raise ConfigError(
            "--steps and --quality need an outside model as the control, under whose name runs keep sides"
        )


def _parse_steps(text: str) -> tuple[float, ...]:
    """Read the shares of `--steps` in percent. Raises `ConfigError`."""
    try:
        steps = tuple(map(float, text.split(",")))
    except ValueError:
        steps = ()
    if not steps or list(steps) != sorted(set(steps)) or not 0 < steps[0] <= steps[-1] < 100:
        raise ConfigError(f"--steps {text!r} is no list of rising shares below 100, such as 5,25")
    return steps


def _find_cascade(args: argparse.Namespace, connection: duckdb.DuckDBPyConnection) -> Cascade | None:
    """Return which answers of an apprentice `--quality` and `--pairs` allow to show; `None` without them: all. Raises
    `ConfigError` if no threshold keeps the quality."""
    if args.quality is None and args.pairs is None:
        return None
    if args.pairs is None or args.quality is None or not 0 < args.quality < 1:
        raise ConfigError("--quality is a probability below 1, and comes with --pairs")
    try:
        pairs = [(float(logprob), bool(agrees)) for logprob, agrees in connection.execute(args.pairs).fetchall()]
    except (duckdb.Error, TypeError, ValueError) as error:
        raise ConfigError(f"--pairs: the query does not give numbers and truth values: {error}") from error
    cascade = find_threshold(pairs, args.quality, args.alpha)
    if cascade is None:
        agreed = sum(agrees for _, agrees in pairs)
        raise ConfigError(
            f"no logprob keeps a quality of {args.quality:g}: of {len(pairs)} pairs {agreed} agree. Compare more "
            "calls, or state a lower quality"
        )
    sys.stdout.write(
        f"answers with a mean logprob of {cascade.min_logprob:.4g} or more are shown: {cascade.shown} of "
        f"{cascade.pairs} pairs, of which {cascade.agreed} agree\n"
    )
    return cascade


def _watch(args: argparse.Namespace) -> int:
    """Look at the results every `--every` seconds, and act on the verdict until a decision ends the comparison."""
    gateway, config = connect(args), installation_settings(args.run_dir, sections=("store",))
    begun = _in_force(gateway, args.model)
    while True:
        evidence = _read_until_now(config, begun)
        _print_findings(evidence)
        awaits_approval = evidence.verdict == "promote" and evidence.plan.approval
        if awaits_approval:
            sys.stdout.write(f"it waits for `journeywork decide approve {args.model}`\n")
        sys.stdout.flush()  # a pipe would keep the lines of many looks
        if not awaits_approval and evidence.verdict != "continue":
            crash.point("decide.before_publish")
            _until_answered(partial(_publish, gateway, begun, evidence), args.once, args.every)
            crash.point("decide.after_publish")
            if evidence.verdict != "raise":
                return 0
        if args.once:
            return 3
        time.sleep(args.every)
        begun = _until_answered(partial(_in_force, gateway, args.model), args.once, args.every)


def _until_answered(request: Callable[[], T], once: bool, every: float) -> T:
    """Return what `request` returns. Repeat it every `every` seconds while the gateway does not answer (it restarts, or
    has no log), unless `once`. A decision is made once however often it is sent. Raises `GatewayError` if the gateway
    refuses."""
    while True:
        try:
            return request()
        except GatewayError as error:
            if once or error.status not in (0, 502, 503, 504):
                raise
            sys.stderr.write(visible(f"{error} (asked again in {every:g} s)\n"))
            time.sleep(every)


def _approve(args: argparse.Namespace) -> int:
    """Promote the candidate in a person's name, if the results show that it may be."""
    gateway, config = connect(args), installation_settings(args.run_dir, sections=("store",))
    begun = _in_force(gateway, args.model)
    evidence = _read_until_now(config, begun)
    _print_findings(evidence)
    if evidence.verdict != "promote":
        raise ConfigError(f"{evidence.candidate} is not shown to be better: the verdict is {evidence.verdict}")
    _publish(gateway, begun, evidence, args.by)
    return 0


def _check(args: argparse.Namespace) -> int:
    """Compute every recorded decision again and print which are equal: the same runs in the same order give the same
    floats. Return 1 if one differs. It may differ rightly where runs were erased or are older than `store.keep_days`,
    or came to the store late (`_SETTLED_S`)."""
    config = installation_settings(args.run_dir, sections=("store",))
    connection = sql.connect(config)
    different = 0
    rows = connection.execute(_RECORDED, [config.project]).fetchall()
    decisions = [(model, text, evidence) for model, text in rows if (evidence := _read_recorded(text)) is not None]
    for model, text, recorded in decisions:
        again = read_evidence(connection, config.project, recorded, recorded.until)
        different += again != recorded
        now = msgspec.json.encode(again).decode()
        result = "equal" if again == recorded else f"DIFFERENT: recorded {text}, now {now}"
        sys.stdout.write(visible(f"{model}: {recorded.verdict} of {recorded.candidate}: {result}") + "\n")
    if others := len(rows) - len(decisions):
        sys.stdout.write(f"{others} decisions have evidence of other programs, which is not computed\n")
    sys.stdout.write(f"{len(decisions)} decisions, {different} different\n")
    return 1 if different else 0


def _policy_path(model: str, action: str) -> str:
    """Return the path of the gateway's API for a decision (`action`) about a model."""
    return f"/v1/policies/{quote(model, safe='')}/{action}"


def _read_recorded(text: str) -> Evidence | None:
    """Read the evidence of a decision; `None` if it has none, or another program wrote it in a form of its own."""
    try:
        return msgspec.json.decode(text, type=Evidence)
    except msgspec.DecodeError:
        return None


def _in_force(gateway: GatewayApi, model: str) -> _Begun:
    """Return the comparison that is in force for a model, by the last decision. Raises `ConfigError` if there is
    none."""
    policies = {p["model"]: p for p in gateway.ask("GET", "/v1/policies")["data"]}
    decision = (policies.get(model) or {}).get("decision") or {}
    evidence = _read_recorded(decision.get("evidence") or "")
    if decision.get("action") != "split" or evidence is None:
        why = f"the last decision is {decision['action']}" if decision else "there was no decision"
        raise ConfigError(f"no comparison of {model} is in force, {why}: journeywork decide begin")
    share = Share(percent=decision["percent"], since=decision["at"])
    # The evidence that raised the share was recorded before, so it lacks the new share.
    earlier = evidence.shares if evidence.verdict == "raise" else ()
    begun = msgspec.structs.replace(evidence, shares=(*earlier, share), verdict="continue", findings=())
    last = decision["request"]
    return _Begun(begun, last.removesuffix(f"-{share.percent:g}") if earlier else last, last)


def _read_until_now(config: Config, begun: _Begun) -> Evidence:
    """Return what the history says of a comparison, up to the time that the store has surely written."""
    until = int((time.time() - _SETTLED_S) * 1e6)
    return read_evidence(sql.connect(config), config.project, begun.evidence, until)


def _publish(gateway: GatewayApi, begun: _Begun, evidence: Evidence, by: str = "") -> None:
    """Send the decision that the verdict asks for to the gateway. The id `request` makes it one decision, however often
    it is sent; `after` makes the gateway refuse it if somebody decided meanwhile. Either is printed and is no error."""
    raised = evidence.verdict == "raise"
    version = evidence.candidate if raised or evidence.verdict == "promote" else evidence.control
    percent = evidence.next_percent()
    cascade = evidence.plan.cascade if version == evidence.candidate else None
    body = {
        "version": version,
        "by": by,
        "reason": _finding_text(evidence.plan.metric.sql, evidence.findings[0]),
        "evidence": msgspec.json.encode(evidence).decode(),
        "request": f"{begun.request}-{percent:g}" if raised else f"{begun.request}-decided",
        "after": begun.last,
        "min_logprob": cascade.min_logprob if cascade else None,
        **({"other": evidence.control, "percent": percent} if raised else {}),
    }
    say_what_is_awaited(version)
    try:
        gateway.ask("POST", _policy_path(evidence.model, "split" if raised else "promote"), body)
    except GatewayError as error:
        if error.code not in ("request_exists", "decision_changed"):
            raise
        sys.stdout.write("another watcher has decided it already\n")
        return
    share = f"{percent:g} % of the runs" if raised else "runs"
    sys.stdout.write(visible(f"{evidence.verdict}: {share} go to {version}\n"))


def _print_findings(evidence: Evidence) -> None:
    for metric, finding in zip((evidence.plan.metric, *evidence.plan.guards), evidence.findings, strict=True):
        sys.stdout.write(visible(_finding_text(metric.sql, finding)) + "\n")
    sys.stdout.write(f"verdict: {evidence.verdict}\n")


def _finding_text(name: str, finding: Finding) -> str:
    """Return a finding as a line: means, difference with its interval, and numbers of runs and pairs."""
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
