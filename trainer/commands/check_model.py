"""`journeywork check-model MODEL`: says whether a base model trains right on this machine, and how.

    journeywork check-model Qwen/Qwen3-8B
    journeywork check-model /models/gemma-3-4b --set trainer.lora.rank=16

The model is loaded as the trainer would load it, and what a training pass computes is compared with the model's
own forward pass (see `trainer.engine.verify`). Exits 0 where it trains right, 1 where it is refused, 2 on bad
usage or settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from pipeline.config import Config, ConfigError, ModelConfig, TrainerConfig, load
from pipeline.running.plan import check_base
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides, command_parser
from trainer.commands import options
from trainer.first import import_first

if TYPE_CHECKING:
    from trainer.engine.engine import Engine


def check(base: str, config: TrainerConfig) -> Engine | str:
    """Load a base model as the trainer does. Returns the reason if the model can't be trained."""
    import_first(Config(models=(ModelConfig(base=base),), trainer=config))
    from trainer.engine.engine import Engine
    from trainer.engine.loading import first_sentence

    try:
        return Engine(base, config)
    except ConfigError as error:  # it can't be loaded, or computes other logprobs
        return str(error)
    except RuntimeError as error:  # memory does not hold it
        return f"{base} can't be trained: {first_sentence(error)}"


def report(engine: Engine) -> str:
    """What was found of a model that trains right."""
    model, verified = engine.model, engine.passes.verified
    on, parameters = ", ".join(sorted(model.lora.target_modules)), sum(p.numel() for p in model.parameters)
    lines = [f"{model.base}: trains right", f"  adapter: rank {model.lora.r}, {parameters:,} parameters, on {on}"]
    for text, difference in (
        ("one row a sequence", verified.padded),
        ("prefixes shared", verified.packed),
        ("rows with images", verified.images),
    ):
        if difference is not None:
            lines.append(f"  {text}: at most {difference.largest:.3g} nats from the model's own logprobs")
    how = "prefixes are shared where that costs less" if verified.layout == "prefix" else "one row a sequence"
    because = f" ({verified.why_padded})" if verified.why_padded else ""
    lines.append(f"  layout: {how}{because}; attention: {verified.attention}")
    if not _has_chat_template(model.base):
        lines.append(
            "  its tokenizer has no chat template, so vLLM refuses chat completions: give one by "
            """`--set 'vllm.args=["--chat-template", "FILE"]'`"""
        )
    return "\n".join(lines)


def _has_chat_template(base: str) -> bool:
    from transformers import AutoTokenizer

    try:
        return bool(AutoTokenizer.from_pretrained(base).chat_template)
    except (OSError, ValueError):  # there is no tokenizer
        return False


def parser() -> argparse.ArgumentParser:
    out = command_parser("check-model", "Say whether a base model trains right on this machine.")
    out.add_argument("model", help="folder or hub name of the base model")
    out.add_argument("--config", help="settings, TOML; its [trainer] is used")
    add_overrides(out)
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    with options.running("check-model"):
        config: Config = load(args.config, [*args.overrides, f"models.0.base={json.dumps(args.model)}"])
        check_base(args.model, "model")
        checked = check(args.model, config.trainer_of(config.models[0]))
        if isinstance(checked, str):
            sys.stdout.write(f"{args.model}: refused: {checked}\n")
            raise SystemExit(1)
        sys.stdout.write(f"{report(checked)}\n")


if __name__ == "__main__":
    logs.configure("check-model", "WARNING")
    main()
