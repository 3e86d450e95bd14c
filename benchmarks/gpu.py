"""The GPU proof: measures every claim of this project about GPUs, on a machine with an NVIDIA GPU.

    make gpu-proof                                        all parts, about half an hour on a large GPU
    python -m benchmarks.gpu --only tests 0.6b --seconds 540
    python -m benchmarks.gpu --device cpu --tiny          the same code on toy sizes; proves nothing

| part | what | needs beside torch, transformers, peft, accelerate, trl, datasets, msgspec and tomli-w |
| --- | --- | --- |
| tests | `tests/gpu`: kernels, layouts, memory and types on CUDA | pytest, pytest-timeout |
| 0.6b, 4b, 8b | a Qwen3 shape, random weights: tokens/s, MFU, memory, TRL on the same batches | |
| sampler | logprobs of vLLM and of the trainer in bfloat16, before and after steps | vLLM for CUDA |
| swaps | adapter swaps under 256 streams, through the gateway | vLLM for CUDA, the whole project |
| demo | the example, whole | vLLM for CUDA, the whole project |

Nothing is downloaded. A part that can't run is recorded as skipped, with the reason. Results are written after every
measurement. A part with results of the same code and device is not run again, and an interrupted part continues, so
the command may be run in pieces (`--only`, `--seconds`). On a GPU it writes benchmarks/results/gpu.json and
docs/gpu.md; on a CPU both go to runs/gpu-proof. Exits with 1 if a part failed, with 2 if the device does not
exist."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_machine, gpu_models, gpu_page
from benchmarks.gpu_machine import ROOT, write

LEAST_S = 20.0
"""Minimum of seconds that must be left to begin a part."""
GRACE_S = 20.0
"""Seconds that a part has to stop its servers after SIGTERM."""
SIZES = tuple(gpu_models.SHAPES)
PARTS = ("tests", *SIZES, "sampler", "swaps", "demo")
LIMITS = {"tests": 400.0, "demo": 900.0}
"""Maximum of seconds for a part."""
OTHER_LIMIT = 540.0
ROOM = 1.3
"""Minimum of GPU memory for a model size, as a multiple of its weights."""


@dataclass(frozen=True)
class Options:
    device: str
    tiny: bool
    rounds: int
    models: Path
    again: bool


def why_not(part: str, options: Options, machine: dict[str, Any]) -> str:
    """The reason why a part can't run on this machine; empty if it can."""
    if lacking := gpu_machine.missing(gpu_machine.TRAINER_NEEDS):
        return lacking
    if part == "tests":
        return gpu_machine.missing(("pytest", "pytest_timeout"))
    if part in SIZES:
        room = machine.get("memory_bytes")
        if room is not None and not options.tiny and room < (needed := ROOM * gpu_models.BYTES[part]):
            return f"the GPU has {room / 2**30:.0f} GiB, and about {needed / 2**30:.0f} GiB are needed"
        return ""
    if reason := gpu_machine.without_vllm(options.device):
        return reason
    if part == "sampler":
        return gpu_machine.missing(gpu_machine.SAMPLER_NEEDS)
    needed_modules = gpu_machine.DEMO_NEEDS if part == "demo" else gpu_machine.LOOP_NEEDS
    return gpu_machine.missing(needed_modules) or gpu_machine.without_nats()


def command(part: str, into: Path, scratch: Path, options: Options) -> list[str]:
    """The command line that runs a part."""
    if part == "tests":
        report = f"--junit-xml={scratch / 'tests.xml'}"
        pytest = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
        return [*pytest, report, "tests/gpu"]
    if part == "demo":
        small = ["--steps", "2", "--groups", "2", "--eval-games", "32"] if options.tiny else []
        return [sys.executable, "-m", "examples.tictactoe.demo", "--run-dir", str(scratch / "demo"), *small]
    out = [
        sys.executable, "-m", "benchmarks.gpu", "--part", part, "--into", str(into), "--scratch", str(scratch),
        "--device", options.device, "--rounds", str(options.rounds), "--models", str(options.models),
    ]  # fmt: skip
    return [*out, "--tiny"] if options.tiny else out


def run_part(
    part: str, before: dict[str, Any], options: Options, seconds: float, keep: Any
) -> dict[str, Any]:
    """Run a part for at most `seconds`; `before` are its results so far. `keep(results)` is called about every
    second."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-proof-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        into, log = scratch / "part.json", scratch / "part.log"
        if before:
            write(into, before)
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        if options.device == "cpu":
            env |= {"CUDA_VISIBLE_DEVICES": "", "JOURNEYWORK_GPU_TESTS_ANYWHERE": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command(part, into, scratch, options), cwd=ROOT, env=env, stdout=file, stderr=file,
                start_new_session=True
            )  # fmt: skip
        late = False
        try:
            while process.poll() is None:
                try:
                    process.wait(min(1.0, max(0.05, seconds - (time.monotonic() - began))))
                except subprocess.TimeoutExpired:
                    keep(_read(into, before))
                if time.monotonic() - began >= seconds and process.poll() is None:
                    late = True
                    break
        finally:
            _end(process)
        result = _read(into, before)
        if part == "tests":
            result = gpu_page.tests_of(scratch / "tests.xml")
        report = scratch / "demo" / "report.json"
        if part == "demo" and report.exists():
            result = json.loads(report.read_text())
        out: dict[str, Any] = {"status": "done", "seconds": round(time.monotonic() - began, 1)}
        if late:
            out |= {"status": "cut off", "why": f"not done within {seconds:.0f} s"}
        elif process.returncode:
            text = log.read_text(errors="replace")
            sys.stderr.write(text[-6000:])
            lines = [line for line in text.splitlines() if line.strip()]
            out |= {"status": "failed", "why": lines[-1][:500] if lines else f"exit {process.returncode}"}
        return out | {"result": result}


def _read(into: Path, before: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(into.read_text()) if into.exists() else before
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process of a part. SIGTERM lets it stop its servers, which are in process groups of their own; SIGKILL
    follows if it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def child(args: argparse.Namespace) -> None:
    """Run one part; the entry point of its process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` stops the servers
    from benchmarks import gpu_sampler, gpu_trainer

    options = {"device": args.device, "tiny": args.tiny, "rounds": args.rounds}
    args.models.mkdir(parents=True, exist_ok=True)
    if args.part in SIZES:
        gpu_trainer.measure(args.part, args.into, args.models, args.scratch, **options)
    elif args.part == "sampler":
        gpu_sampler.difference(args.into, args.models, args.scratch, **options)
    else:
        gpu_sampler.swaps(args.into, args.models, args.scratch, **options)


def proof(parts: list[str], options: Options, out: Path, page: Path, seconds: float) -> dict[str, Any]:
    """Run `parts` within `seconds` and write results and page after each; the results."""
    began = time.monotonic()
    machine, code = gpu_machine.describe(options.device), gpu_machine.code()
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if report.get("machine", {}).get("name") != machine["name"] or report.get("tiny") != options.tiny:
        report = {}  # another machine's figures don't mix with these
    report |= {
        "command": "make gpu-proof", "measured_on_a_gpu": options.device == "cuda" and not options.tiny,
        "tiny": options.tiny, "machine": machine, "versions": gpu_machine.versions(),
    }  # fmt: skip
    report.setdefault("parts", {})

    def note(part: str, found: dict[str, Any]) -> None:
        report["parts"][part] = {"code": code, **found}
        report["parts"] = {p: report["parts"][p] for p in PARTS if p in report["parts"]}
        write(out, report)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(gpu_page.page(report))

    for part in parts:
        old = report["parts"].get(part, {})
        same = old.get("code") == code and not options.again
        if same and old.get("status") == "done":
            print(f"{part}: done before")
            continue
        before = old.get("result", {}) if same else {}
        left = seconds - (time.monotonic() - began)
        reason = why_not(part, options, machine)
        if old.get("status") == "done" and (reason or left < LEAST_S):
            print(f"{part}: not measured again, {reason or 'no time is left'}")
            continue
        if reason:
            found = {"status": "skipped", "why": reason}
        elif left < LEAST_S:
            found = {"status": "cut off", "why": "no time was left for it", "result": before}
        else:
            print(f"{part}: running", flush=True)
            limit = min(LIMITS.get(part, OTHER_LIMIT), max(left - GRACE_S, LEAST_S / 2))

            def keep(result: dict[str, Any], part: str = part) -> None:
                if result and report["parts"].get(part, {}).get("result") != result:
                    note(part, {"status": "cut off", "why": "it was still running", "result": result})

            found = run_part(part, before, options, limit, keep)
        note(part, found)
        print(f"{part}: {found['status']}{': ' + found['why'] if 'why' in found else ''}", flush=True)
    return report


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--seconds", type=float, default=7200.0, help="time for all of it")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each measurement")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the command itself")
    parser.add_argument("--again", action="store_true", help="measure again what was done before")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "gpu-proof-models")
    parser.add_argument("--out", type=Path, help="results, JSON")
    parser.add_argument("--page", type=Path, help="the page that is made of them")
    for name in ("--part", "--into", "--scratch"):  # of a part's process
        parser.add_argument(name, type=str if name == "--part" else Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        child(args)
        return
    measured = args.device == "cuda" and not args.tiny
    aside = ROOT / "runs" / "gpu-proof"
    out = args.out or (ROOT / "benchmarks" / "results" / "gpu.json" if measured else aside / "gpu.json")
    page = args.page or (ROOT / "docs" / "gpu.md" if measured else aside / "gpu.md")
    options = Options(
        args.device, args.tiny, args.rounds, args.models.with_name(args.models.name + ("-tiny" if args.tiny else "")),
        args.again,
    )  # fmt: skip
    # SIGTERM runs the `finally` blocks, as Ctrl-C does, so that servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        report = proof([p for p in PARTS if p in args.only], options, out, page, args.seconds)
    except RuntimeError as error:
        print(f"gpu-proof: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{out}\n{page}")
    if any(part["status"] == "failed" for part in report["parts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
