"""Writes docs/gpu.md from the results of the GPU proof.

python -m benchmarks.gpu_page [RESULTS.json] [PAGE.md]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

GIB = 2**30
SIZES = ("0.6b", "4b", "8b")


def tests_of(file: Path) -> dict[str, Any]:
    """The counts of a JUnit file, the names of failed tests and the reasons of skipped ones."""
    if not file.exists():
        return {}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed, reasons = [], set()
    for case in ElementTree.parse(file).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(case.get("name"))
        elif (skipped := case.find("skipped")) is not None:
            counts["skipped"] += 1
            reasons.add(skipped.get("message", ""))
        else:
            counts["passed"] += 1
    return {**counts, "failures": failed, "skip_reasons": sorted(reasons)}


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    columns = list(head)
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows), ""]


def _gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value / GIB:.2f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _size(size: str, result: dict[str, Any]) -> list[str]:
    lines = [f"## Qwen3-{size.upper()}'s shape", ""]
    if model := result.get("model"):
        lines += [
            f"{model['parameters'] / 1e9:.2f} billion parameters in {model['dtype']}, rank {model['lora_rank']}. "
            f"Gradient checkpointing is {'on' if model['gradient_checkpointing'] else 'off'}.",
            "",
        ]
    if verified := result.get("verified"):
        packed = verified["packed_max"]
        lines += [
            f"Logprobs of a training pass differ from the model's own by at most {verified['padded_max']:.3g} nats"
            + (f" (prefixes shared: {packed:.3g})" if packed is not None else "")
            + f". Layout: {verified['layout']}, attention: {verified['attention']}.",
            "",
        ]
    if "matmul_tflops" in result:
        sheet = result.get("data_sheet_tflops")
        lines += [
            f"A large matrix product reaches {result['matmul_tflops']:.3g} TFLOP/s on this device; "
            + (f"its data sheet says {sheet:g}." if sheet else "its data sheet's rate is not known here."),
            "",
        ]
    rows = []
    for batch, found in result.get("batches", {}).items():
        one, other = found.get("journeywork"), found.get("trl")
        if one:
            rows.append([
                batch, "Journeywork", f"{one['seconds']:.3f}", f"{one['trained_tokens_per_s']:.0f}",
                f"{one['forward_tokens_per_s']:.0f}", _share(one["mfu"]), _share(one["mfu_of_matmul"]),
                _gib(one["peak_bytes"]),
                f"{one['layout']}, {one['passes']} passes of up to {one['tokens_of_largest_pass']} tokens",
            ])  # fmt: skip
        if other:
            rows.append([
                batch, "TRL", f"{other['seconds']:.3f}", f"{other['trained_tokens_per_s']:.0f}", "", "", "",
                _gib(other["peak_bytes"]), f"padded, {other['rows_a_pass']} rows a pass",
            ])  # fmt: skip
    if rows:
        lines += _table(
            ("batch", "trainer", "s a step", "trained tokens/s", "forward tokens/s", "MFU (data sheet)",
             "of the matrix product", "peak GiB", "layout"), rows,
        )  # fmt: skip
    return lines


def _sampler(result: dict[str, Any]) -> list[str]:
    if not result.get("steps"):
        return []
    lines = [
        "## Sampler and trainer", "",
        f"vLLM's logprobs of what it sampled, against the trainer's of the same tokens, in {result['dtype']}. A step "
        "is refused "
        f"where the mean exceeds {result['bound']:g} nats.", "",
    ]  # fmt: skip
    return lines + _table(
        ("version", "tokens", "mean logprob", "difference: mean nats", "largest", "KL, nats a token"),
        ([s["version"], f"{s['tokens']:.0f}", f"{s['logprob_mean']:.2f}", f"{s['on_policy_logprob_diff']:.4g}",
          f"{s['on_policy_logprob_diff_max']:.4g}", f"{s['kl_sampler']:.3g}"] for s in result["steps"]),
    )  # fmt: skip


def _swaps(result: dict[str, Any]) -> list[str]:
    found = result.get("swaps")
    if not found:
        return []
    lines = [
        f"## Adapter swaps under {found['streams']} streams", "",
        f"{found['swaps']} swaps; from a checkpoint's publication until it serves "
        f"{found['publish_to_serving_p50_s']:.2f} s (median), {found['publish_to_serving_max_s']:.2f} s at most. "
        f"{found['failures']} of {found['requests']} requests failed; "
        f"{found['mislabelled']} of {found['exchanges']} exchanges carried another version than vLLM's.", "",
    ]  # fmt: skip
    return lines + _table(
        ("ms", "without swaps", "with swaps"),
        ([f"{name}, {q}", f"{found[f'calm_{key}_{q}_ms']:.1f}", f"{found[f'swap_{key}_{q}_ms']:.1f}"]
         for name, key in (("gap between chunks", "gap"), ("first chunk", "first_chunk")) for q in ("p50",
         "p99", "max")),
    )  # fmt: skip


def page(report: dict[str, Any]) -> str:
    """The whole page, Markdown."""
    machine = report["machine"]
    lines = ["# Measured on a GPU" if report["measured_on_a_gpu"] else "# Not measured on a GPU", ""]
    lines += ["This page is generated: `make gpu-proof` measures, and writes it. Do not edit it.", ""]
    if not report["measured_on_a_gpu"]:
        lines += [
            "These figures are of a CPU or of toy sizes. They show that the command works, and nothing else.",
            "",
        ]
    memory = machine.get("memory_bytes")
    lines += [
        f"Device: {machine['name']}" + (f", {memory / GIB:.0f} GiB" if memory else "")
        + (f", driver {machine['driver']}" if "driver" in machine else "")
        + ". " + ", ".join(f"{name} {version}" for name, version in report["versions"].items()) + ".",
        "",
        "The models have random weights in the shapes of Qwen3's published ones. A step is forward, loss, backward, "
        "optimizer and, on our side, the checks of every step. MFU counts 4 operations a parameter and forward "
        "token: the base model's weights take no gradient; what is computed twice and attention's own products are "
        "not counted.",
        "",
    ]  # fmt: skip
    codes = {part["code"] for part in report["parts"].values()}
    if len(codes) > 1:
        lines += [
            "The parts were not all measured on the same code; `code` in the results tells them apart.",
            "",
        ]
    rows = []
    for name, part in report["parts"].items():
        said = part.get("why", "")
        result = part.get("result", {})
        if name == "tests" and "passed" in result:
            said = f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
            said += f" ({'; '.join(result['skip_reasons'])})" if result["skip_reasons"] else ""
        rows.append([name, part["status"], part.get("seconds", ""), said.replace("|", "\\|")])
    lines += _table(("part", "status", "seconds", ""), rows)
    parts = {name: part.get("result", {}) for name, part in report["parts"].items()}
    for size in SIZES:
        if parts.get(size):
            lines += _size(size, parts[size])
    lines += _sampler(parts.get("sampler", {})) + _swaps(parts.get("swaps", {}))
    if demo := parts.get("demo"):
        lines += ["## Demo", ""]
        simple = {
            k: v for k, v in demo.items() if isinstance(v, (int, float, str)) and not isinstance(v, bool)
        }
        lines += _table(("", "value"), simple.items())
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    results = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/gpu.json")
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/gpu.md")
    out.write_text(page(json.loads(results.read_text())))


if __name__ == "__main__":
    main()
