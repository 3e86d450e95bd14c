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
import tempfile
from pathlib import Path
from typing import Any

from pipeline.config import Config, ConfigError, ModelConfig, TrainerConfig, load
from pipeline.running.plan import check_base
from pipeline.telemetry import logs as log
from trainer.commands import cli
from trainer.first import import_first


def check(base: str, config: TrainerConfig) -> dict[str, Any]:
    """The findings as `--json` prints them: differences in nats. `refused` is the reason why the
    model can't be trained, `None` where it can."""
    import_first(Config(models=(ModelConfig(base=base),), trainer=config))
    from trainer.engine.engine import Engine
    from trainer.engine.loading import first_sentence
    from trainer.engine.verify import RefusedError

    out: dict[str, Any] = {
        "model": base, "padded_difference": None, "packed_difference": None, "images_difference": None, "layout": None,
        "refused": None,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        try:
            engine = Engine(base, config, Path(scratch))
        except RefusedError as error:
            verified = error.verified
            out["refused"] = verified.refused
        except ConfigError as error:  # the model can't be loaded
            out["refused"] = str(error)
            return out
        except RuntimeError as error:  # memory does not hold it
            out["refused"] = f"{base} can't be trained: {first_sentence(error)}"
            return out
        else:
            verified = engine.passes.verified
            out["gradient_checkpointing"] = engine.model.checkpointing
            out["adapter"] = {
                "rank": config.lora.rank, "layers": sorted(engine.model.lora.target_modules),
                "experts": config.lora.experts, "parameters": sum(p.numel() for p in engine.model.parameters),
            }  # fmt: skip
            out["device"], out["dtype"] = (
                str(engine.model.device),
                str(engine.model.dtype).removeprefix("torch."),
            )
    out["padded_difference"] = verified.padded.largest
    out["packed_difference"] = verified.packed.largest if verified.packed else None
    out["images_difference"] = verified.images.largest if verified.images else None
    out["layout"] = verified.layout if out["refused"] is None else None
    out["attention"], out["why_padded"] = verified.attention, verified.why_padded
    return out


def report(findings: dict[str, Any]) -> str:
    """The findings as text."""
    lines = [
        f"{findings['model']}: "
        + (f"refused: {findings['refused']}" if findings["refused"] else "trains right")
    ]
    if adapter := findings.get("adapter"):
        on = [*adapter["layers"], *(["the experts"] if adapter["experts"] else [])]
        lines.append(
            f"  adapter: rank {adapter['rank']}, {adapter['parameters']:,} parameters, on {', '.join(on)}"
        )
    for name, text in (
        ("padded", "one row a sequence"), ("packed", "prefixes shared"), ("images", "rows with images"),
    ):  # fmt: skip
        if (difference := findings[f"{name}_difference"]) is not None:
            lines.append(f"  {text}: at most {difference:.3g} nats from the model's own logprobs")
    if findings["layout"]:
        how = (
            "prefixes are shared where that costs less"
            if findings["layout"] == "prefix"
            else "one row a sequence"
        )
        because = f" ({findings['why_padded']})" if findings["why_padded"] else ""
        lines.append(f"  layout: {how}{because}; attention: {findings['attention']}")
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="journeywork check-model", description="Say whether a base model trains right on this machine."
    )
    out.add_argument("model", help="folder or hub name of the base model")
    out.add_argument("--json", action="store_true", help="print the findings as JSON")
    out.add_argument("--config", help="settings, TOML; its [trainer] is used")
    out.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)

    def command() -> None:
        config: Config = load(args.config, [*args.overrides, f"models.0.base={json.dumps(args.model)}"])
        check_base(args.model, "model")
        findings = check(args.model, config.trainer_of(config.models[0]))
        sys.stdout.write(json.dumps(findings, indent=2) + "\n" if args.json else report(findings))
        if findings["refused"] is not None:
            raise SystemExit(1)

    cli.run("check-model", command)


if __name__ == "__main__":
    log.configure("check-model", "WARNING")
    main()
