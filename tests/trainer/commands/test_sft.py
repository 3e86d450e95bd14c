"""`journeywork sft` trains the assistant's turns, and the model gets better at them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import store.service
from pipeline import config as configuration
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.trainer import kit
from trainer.commands import cli, sft

BASE = Path(__file__).parents[3] / "examples" / "tictactoe" / "model"
CHAT = [
    {"role": "user", "content": "a1=. b1=x"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "c1=o"},
    {"role": "assistant", "content": "b2"},
]


def test_assistant_turns_are_learned_and_nothing_else() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    (row,) = sft.tokens_of_chat(tokenizer, CHAT)
    learned = [i for i, m in zip(row["input_ids"], row["completion_mask"], strict=True) if m]
    text = tokenizer.decode(learned, skip_special_tokens=True).replace(" ", "")
    assert text == "a1b2"
    # With each reply its end of turn, or the model would never learn to stop.
    assert len(learned) == 4


def test_a_line_that_is_no_chat_is_named() -> None:
    good = json.dumps({"messages": CHAT})
    with pytest.raises(cli.UsageError, match="line 2"):
        list(sft.chats_of([good, "{}"]))
    with pytest.raises(cli.UsageError, match="line 1 has no assistant"):
        list(sft.chats_of([json.dumps({"messages": CHAT[:1]})]))
    assert list(sft.chats_of(["", good])) == [(CHAT, None)]
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert list(sft.chats_of([json.dumps({"messages": CHAT, "tools": tools})])) == [(CHAT, tools)]


def test_tools_are_rendered_as_the_template_does() -> None:
    class Template:
        """A tokenizer whose template shows the tools first."""

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            shown = "".join(tool["function"]["name"] for tool in options["tools"] or ())
            text = shown + "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
            return text + ("<a>" if options["add_generation_prompt"] else "")

        def __call__(self, text: str, **_: Any) -> Any:
            return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    (row,) = sft.tokens_of_chat(Template(), CHAT[:2], [{"type": "function", "function": {"name": "look"}}])
    assert "".join(map(chr, row["input_ids"])).startswith("look<u>a1=. b1=x<a>")


def test_the_trained_model_reproduces_its_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join([json.dumps({"messages": CHAT})] * 16))
    out = tmp_path / "model"
    sft.main(
        [str(out), "--base", str(BASE), "--data", str(data), "--epochs", "4", "--learning-rate", "1e-2",
         "--batch-size", "4", "--schedule", "cosine", "--warmup", "0.25"]
    )  # fmt: skip
    assert "16 sequences" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(out)
    (row,) = sft.tokens_of_chat(tokenizer, CHAT)

    def surprise(folder: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        chosen = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
        return float(-(chosen * torch.tensor(row["completion_mask"][1:])).sum())

    assert surprise(out) < surprise(BASE) / 2


def test_tokens_of_a_run_are_the_sampled_ones() -> None:
    exchanges = kit.turns("t", 1)
    (row,) = sft._rows(exchanges)
    assert sum(row["completion_mask"]) == 6


@pytest.mark.parametrize("args", [["--data", "missing.jsonl"], ["--from-run", "no-such-run"]])
def test_a_source_that_is_not_there_fails_with_a_line(
    tmp_path: Path, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        sft.main([str(tmp_path / "out"), "--base", str(BASE), *args])
    assert error.value.code in (1, 2)
    assert "journeywork sft:" in capsys.readouterr().err


@pytest.mark.anyio
@pytest.mark.slow
async def test_the_best_trajectories_of_a_run_are_found_in_its_store(
    nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    config = kit.settings(tiny_base, tmp_path, nats_config)
    configuration.save(config, config.path("config.toml"))
    started = anyio.Event()
    async with Broker.connect(nats_config) as broker:
        scored = await kit.publish_group(broker, "g", [0.0, 1.0, 0.5], seed=1)
        async with anyio.create_task_group() as tg:
            tg.start_soon(store.service.serve, config, lambda **_: started.set())
            with anyio.fail_after(30):
                await started.wait()
                while not (found := await anyio.to_thread.run_sync(_try_rows, tmp_path, 1)):
                    await anyio.sleep(0.3)
            tg.cancel_scope.cancel()
    (best,) = found
    wanted = kit.turns("g-1", 1001)
    (row,) = sft._rows(wanted)
    assert best == row
    assert len(sft.rows_of_run(tmp_path, 0, 0.5)) == 2
    assert len(sft.rows_of_run(tmp_path, 0, None)) == len(scored.members)


def _try_rows(run_dir: Path, top: int) -> list[sft.Row]:
    """None before the store has written its first files."""
    try:
        rows = sft.rows_of_run(run_dir, top, None)
    except cli.UsageError:
        return []
    return rows if len(rows) == top else []
