"""`journeywork export`: writes a trained policy into a folder that other programs load.

    journeywork export OUT                        the newest checkpoint of the newest run, as a PEFT adapter
    journeywork export OUT --step best --merged   the best by validation, merged into the base model's weights

A checkpoint that is no longer on disk is read from the lake.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import sys
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.running.installations import installation_settings
from pipeline.telemetry import logs
from pipeline.terminal.parsers import command_parser
from trainer.checkpoints.checkpoint import ADAPTER_FILES, CheckpointError, Checkpoints
from trainer.checkpoints.start import read_version
from trainer.commands import options


def parser() -> argparse.ArgumentParser:
    made = command_parser("export", "Write an adapter or merged weights into a folder.")
    made.add_argument("out", type=Path, help="folder to write; must not exist")
    options.add_installation_arguments(made)
    made.add_argument("--model", help="name of the policy; required if the run has several")
    made.add_argument("--step", default="latest", help="a step, `latest`, or `best` by validation reward")
    made.add_argument("--merged", action="store_true", help="the base model's weights with the adapter merged in")
    return made


def parse_step(step: str, checkpoints: Checkpoints) -> int:
    """Return the step that `--step` names: a number, `latest` or `best`. Raises `CheckpointError` if there is no latest
    or no best checkpoint, and `ConfigError` for another word."""
    if step == "latest":
        if not (steps := checkpoints.steps()):
            raise CheckpointError(f"there is no checkpoint in {checkpoints.folder}: name a step that the lake holds")
        return steps[-1]
    if step == "best":
        if (best := checkpoints.best()) is None:
            raise CheckpointError("no validation trajectories were scored, so no checkpoint is the best: name a step")
        return best.step
    if not re.fullmatch("[1-9][0-9]{0,17}", step):
        raise ConfigError(f"--step {step}: write a number from 1 on, `latest` or `best`")
    return int(step)


def write_adapter(files: dict[str, bytes], out: Path) -> None:
    """Write the files of a PEFT adapter into the folder `out`."""
    for name in ADAPTER_FILES:
        (out / name).write_bytes(files[name])


_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json")
"""Files of a base model that hold its weights, or say which file holds which. A merged model has its own: vLLM finds no
weights where the index of others is left."""


def write_merged(files: dict[str, bytes], base: str, out: Path) -> None:
    """Write the base model with the adapter merged in, and its tokenizer files, into the folder `out`. Raises
    `CheckpointError` if the adapter does not fit the model."""
    import tempfile
    import warnings

    from huggingface_hub import snapshot_download
    from peft import PeftModel

    from trainer.engine.loading import auto_class

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        write_adapter(files, Path(folder))
        # PEFT only warns of tensors that fit nowhere, and would merge the others.
        warnings.filterwarnings("error", message=".*adapter keys")
        try:
            model = PeftModel.from_pretrained(auto_class(base).from_pretrained(base), folder)
        except UserWarning as error:
            raise CheckpointError(f"the adapter does not fit {base}: {str(error)[:300]}") from error
        model.merge_and_unload().save_pretrained(out)
    # The tokenizer's files and the chat template, which inference servers and llama.cpp's converter read.
    source = Path(base) if Path(base).is_dir() else Path(snapshot_download(base, ignore_patterns=[*_WEIGHTS]))
    for file in source.iterdir():
        weights = any(fnmatch.fnmatch(file.name, pattern) for pattern in _WEIGHTS)
        if file.is_file() and not weights and not (out / file.name).exists():
            shutil.copy(file, out / file.name)


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    with options.running("export"):
        config = installation_settings(args.run_dir, args.config, args.overrides)
        if args.model is None and len(config.models) > 1:
            raise ConfigError(f"--model: name one of {', '.join(m.name for m in config.models)}")
        model = config.model(args.model) if args.model else config.models[0]
        if args.out.exists():
            raise ConfigError(f"{args.out} exists already")

        checkpoints = Checkpoints.of(config, model.name)
        step = parse_step(args.step, checkpoints)
        on_disk = step in checkpoints.steps()
        files = checkpoints.read(step)[1] if on_disk else read_version(config, model.name, step).files
        args.out.mkdir(parents=True)
        if args.merged:
            write_merged(files, model.base, args.out)
        else:
            write_adapter(files, args.out)
        sys.stdout.write(f"{model.name}@{step} written to {args.out}\n")


if __name__ == "__main__":
    logs.configure("export")
    main()
