"""`journeywork sft`: supervised fine-tuning as a warm start, with TRL's SFTTrainer.

    journeywork sft OUT --base MODEL --data chats.jsonl           one {"messages": [...]} a line, perhaps with "tools"
    journeywork sft OUT --base MODEL --from-run runs/x --top 200  the best trajectories of a run's store

It writes a model folder: the base with the trained adapter merged in, and the tokenizer. Set `models.base` to it
to start reinforcement learning from it. Only the assistant's turns are trained. Chats are rendered with the
model's chat template, trajectories of a run are trained on the exact tokens that were sampled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.events import ExchangeRecorded, pack_ids, pack_mask
from pipeline.telemetry import logs as log
from trainer.batches.sequences import build
from trainer.commands import cli

logger = log.get_logger("trainer.commands.sft")

Row = dict[str, list[int]]
"""`input_ids` and `completion_mask` of one sequence. The mask is 1 where the token is trained."""


SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
"""How the learning rate goes on after the warm-up, and transformers' name of it: falls to 0 in a line or in half a
cosine, or stays."""


def _share(text: str) -> float:
    """Return a number from 0 to below 1. From 1 on, transformers would take it for a number of steps."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="journeywork sft",
        description="Supervised warm start from chats or from a run's best trajectories.",
    )
    made.add_argument("out", type=Path, help="model folder to write; must not exist")
    made.add_argument("--base", required=True, help="folder or hub name of the model to start from")
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data", type=Path, help='JSONL file, one {"messages": [...]} a line, perhaps with "tools"'
    )
    source.add_argument("--from-run", type=Path, help="run directory whose store holds the trajectories")
    made.add_argument(
        "--top",
        type=int,
        default=0,
        help="with --from-run: number of trajectories, the best first; 0 takes all",
    )
    made.add_argument(
        "--min-reward", type=float, default=None, help="with --from-run: lowest reward of a trajectory"
    )
    made.add_argument("--epochs", type=float, default=1.0)
    made.add_argument("--learning-rate", type=float, default=1e-4)
    made.add_argument("--schedule", choices=tuple(SCHEDULES), default="linear", help="of the learning rate")
    made.add_argument(
        "--warmup", type=_share, default=0.0, help="share of the steps in which the learning rate rises"
    )
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--lora-rank", type=int, default=16)
    made.add_argument("--max-length", type=int, default=4096)
    made.add_argument("--seed", type=int, default=0)
    return made


class Chat(NamedTuple):
    """A conversation, and the tools that the model was offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def chats_of(lines: Iterable[str]) -> Iterator[Chat]:
    """The conversations of the lines of a JSONL file. Raises `UsageError`, which names the line that holds none."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            messages, tools = found["messages"], found.get("tools")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise cli.UsageError(f'line {number}: write {{"messages": [...]}}') from error
        if not isinstance(messages, list) or not any(m.get("role") == "assistant" for m in messages):
            raise cli.UsageError(
                f"line {number} has no assistant message to train: add one or remove the line"
            )
        yield Chat(messages, tools or None)


def tokens_of_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[Row]:
    """The rows of a conversation, put together as for sampled calls: a turn whose prompt continues the one before
    shares its row.

    The prompt of a turn is the conversation before it with the template's generation prompt, as the model gets it
    when it is served. Raises `UsageError` where the template changes a prompt once a reply follows."""
    exchanges: list[ExchangeRecorded] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], tools, add_generation_prompt=True)
        whole = _render(tokenizer, messages[: i + 1], tools, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise cli.UsageError(
                "the model's chat template changes the prompt once a reply follows, so no turn can be trained: "
                "use another template"
            )
        exchanges.append(_exchange(str(len(exchanges)), len(exchanges), prompt, whole[len(prompt) :]))
    return _rows(exchanges)


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _exchange(
    trajectory: str, seq: int, prompt: Sequence[int], sampled: Sequence[int], forced: Sequence[int] = ()
) -> ExchangeRecorded:
    return ExchangeRecorded(
        project="sft", trajectory=trajectory, seq=seq, model="sft", policy_version="sft@0", step=0, request=b"{}",
        response=b"{}", prompt_ids=pack_ids(prompt), sampled_ids=pack_ids(sampled), logprobs=b"",
        forced=pack_mask(forced),
    )  # fmt: skip


def _rows(exchanges: Sequence[ExchangeRecorded]) -> list[Row]:
    return [
        {"input_ids": s.ids.tolist(), "completion_mask": s.loss_mask.astype(int).tolist()}
        for s in build("sft", exchanges)
    ]


def rows_of_run(run_dir: Path, top: int, minimum: float | None) -> list[Row]:
    """The exact tokens of a run's best training trajectories, read through `journeywork sql`.

    `top` is their greatest number (0: all), `minimum` their lowest reward. Raises `UsageError` where the store
    does not answer."""
    floor = "-inf" if minimum is None else repr(float(minimum))
    limit = f"LIMIT {int(top)}" if top else ""
    query = f"""
        WITH worth AS (
          SELECT project, trajectory, max(reward) AS reward FROM rewards
          WHERE outcome = 'scored' AND split = 'train' GROUP BY ALL
        ), best AS (
          SELECT * FROM worth WHERE reward >= '{floor}'::DOUBLE ORDER BY reward DESC, trajectory {limit}
        )
        SELECT e.trajectory, e.seq, e.choice, e.prompt_ids, e.sampled_ids, e.forced
        FROM exchanges e JOIN best USING (project, trajectory)
        WHERE e.status = 'complete' AND NOT e.side_call
        ORDER BY e.trajectory, e.seq, e.choice
    """  # noqa: S608 - only numbers are put into it
    # A command, as services do not import each other.
    done = subprocess.run(
        [sys.executable, "-m", "store.reading.sql", query, "--run-dir", str(run_dir), "--format", "json"],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise cli.UsageError(f"the store of {run_dir} can't be read: {done.stderr.decode().strip()}")
    by_trajectory: dict[str, list[ExchangeRecorded]] = {}
    for found in json.loads(done.stdout or b"[]"):
        by_trajectory.setdefault(found["trajectory"], []).append(
            _exchange(
                found["trajectory"], found["seq"], found["prompt_ids"], found["sampled_ids"], found["forced"] or ()
            )
        )  # fmt: skip
    return [row for exchanges in by_trajectory.values() for row in _rows(exchanges)]


def train(rows: Sequence[Row], args: argparse.Namespace, tokenizer: Any) -> Any:
    """The base model with an adapter trained on `rows` and merged in."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    from trainer.engine.trl_source import plain_logprobs, trl_imports

    with trl_imports():
        from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16 if on_gpu else torch.float32)
    with tempfile.TemporaryDirectory() as scratch, plain_logprobs("cuda" if on_gpu else "cpu"):
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=scratch, use_cpu=not on_gpu, bf16=on_gpu, seed=args.seed, num_train_epochs=args.epochs,
                learning_rate=args.learning_rate, lr_scheduler_type=SCHEDULES[args.schedule],
                warmup_steps=args.warmup, per_device_train_batch_size=args.batch_size,
                max_length=args.max_length, completion_only_loss=True, gradient_checkpointing=on_gpu,
                report_to="none", save_strategy="no", logging_strategy="epoch", disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(list(rows)),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )  # fmt: skip
        result = trainer.train()
        logger.info("trained", rows=len(rows), loss=round(result.training_loss, 4))
        return trainer.model.merge_and_unload()


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)

    def command() -> None:
        from transformers import AutoTokenizer

        if args.out.exists():
            raise cli.UsageError(f"{args.out} exists already")
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        if args.data:
            lines = args.data.read_text("utf-8").splitlines()
            rows = [row for chat in chats_of(lines) for row in tokens_of_chat(tokenizer, *chat)]
        else:
            rows = rows_of_run(args.from_run, args.top, args.min_reward)
        if not rows:
            raise cli.UsageError("there is no sequence to train: check --data, --min-reward and --from-run")
        model = train(rows, args, tokenizer)
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        sys.stdout.write(f"{len(rows)} sequences learned; model written to {args.out}\n")

    cli.run("sft", command)


if __name__ == "__main__":
    log.configure("sft")
    main()
