"""`journeywork check-model MODEL`: says whether a base model trains right on this machine, and how.

    journeywork check-model Qwen/Qwen3-8B
    journeywork check-model /models/gemma-3-4b --json --set trainer.lora.rank=16

The model is loaded as the trainer would load it, and what a training pass computes is compared with the model's
own forward pass (see `trainer.engine.verify`). Exits 0 where it trains right, 1 where it is refused, 2 on bad
usage or settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pipeline.config import Config, ConfigError, ModelConfig, TrainerConfig, load
from pipeline.running.plan import check_base
from pipeline.telemetry import logs
from pipeline.terminal.parsers import add_overrides, command_parser
from trainer.commands import options
from trainer.first import import_first

if TYPE_CHECKING:
    from trainer.engine.verify import Verified


def check(base: str, config: TrainerConfig) -> dict[str, Any]:
    """Load `base` as the trainer would. Return the findings as `--json` prints them: differences in nats, and in
    `refused` the reason why the model can't be trained, `None` if it can."""
    import_first(Config(models=(ModelConfig(base=base),), trainer=config))
    from trainer.engine.engine import Engine
    from trainer.engine.loading import first_sentence
    from trainer.engine.verify import RefusedError

    unknown = ("padded_difference", "packed_difference", "images_difference", "layout", "refused")
    out: dict[str, Any] = {"model": base} | dict.fromkeys(unknown)
    try:
        engine = Engine(base, config)
    except RefusedError as error:
        return out | _compared(error.verified) | {"layout": None, "refused": str(error)}
    except ConfigError as error:  # the model can't be loaded
        return out | {"refused": str(error)}
    except RuntimeError as error:  # memory does not hold it
        return out | {"refused": f"{base} can't be trained: {first_sentence(error)}"}
    model = engine.model
    adapter = {
        "rank": config.lora.rank,
        "layers": sorted(model.lora.target_modules),
        "parameters": sum(p.numel() for p in model.parameters),
    }
    return (
        out
        | _compared(engine.passes.verified)
        | {
            "gradient_checkpointing": model.checkpointing,
            "adapter": adapter,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "chat_template": _has_chat_template(base),
        }
    )


def _has_chat_template(base: str) -> bool:
    """Whether the model's tokenizer has a chat template."""
    from transformers import AutoTokenizer

    try:
        return bool(AutoTokenizer.from_pretrained(base).chat_template)
    except (OSError, ValueError):  # there is no tokenizer
        return False


def _compared(verified: Verified) -> dict[str, Any]:
    """Return the findings of the comparison with the model's own forward pass."""
    return {
        "padded_difference": verified.padded.largest,
        "packed_difference": verified.prefix_shared.largest if verified.prefix_shared else None,
        "images_difference": verified.images.largest if verified.images else None,
        "layout": verified.layout,
        "attention": verified.attention,
        "why_padded": verified.why_padded,
    }


def report(findings: dict[str, Any]) -> str:
    """Return the findings as text for a terminal."""
    lines = [f"{findings['model']}: " + (f"refused: {findings['refused']}" if findings["refused"] else "trains right")]
    if adapter := findings.get("adapter"):
        layers = ", ".join(adapter["layers"])
        lines.append(f"  adapter: rank {adapter['rank']}, {adapter['parameters']:,} parameters, on {layers}")
    for name, text in (("padded", "one row a sequence"), ("packed", "prefixes shared"), ("images", "rows with images")):
        if (difference := findings[f"{name}_difference"]) is not None:
            lines.append(f"  {text}: at most {difference:.3g} nats from the model's own logprobs")
    if findings["layout"]:
        how = "prefixes are shared where that costs less" if findings["layout"] == "prefix" else "one row a sequence"
        because = f" ({findings['why_padded']})" if findings["why_padded"] else ""
        lines.append(f"  layout: {how}{because}; attention: {findings['attention']}")
    if findings.get("chat_template") is False:
        lines.append(
            "  its tokenizer has no chat template, so vLLM refuses chat completions: give one by "
            """`--set 'vllm.args=["--chat-template", "FILE"]'`"""
        )
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    out = command_parser("check-model", "Say whether a base model trains right on this machine.")
    out.add_argument("model", help="folder or hub name of the base model")
    out.add_argument("--json", action="store_true", help="print the findings as JSON")
    out.add_argument("--config", help="settings, TOML; its [trainer] is used")
    add_overrides(out)
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    with options.running("check-model"):
        config: Config = load(args.config, [*args.overrides, f"models.0.base={json.dumps(args.model)}"])
        check_base(args.model, "model")
        findings = check(args.model, config.trainer_of(config.models[0]))
        sys.stdout.write(json.dumps(findings, indent=2) + "\n" if args.json else report(findings))
        if findings["refused"] is not None:
            raise SystemExit(1)


if __name__ == "__main__":
    logs.configure("check-model", "WARNING")
    main()
