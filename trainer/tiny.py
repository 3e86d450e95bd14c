"""Small base models for `journeywork init --tiny` and the examples: made in about a minute on two cores, so that no
weights have to be fetched.

A tiny model is a real Qwen3 of two layers with a tokenizer that knows each word of the task as one token and reads
any other text byte by byte. It is pre-trained to imitate a teacher, a function that plays the task badly on purpose,
so that RL has something to improve. RL can only strengthen what the base model sometimes does, and ends higher the
better the base imitates its teacher (docs/decisions/sdk.md).

Letters at the end of tensors' names: B conversations, T tokens, D width, N turns, V vocabulary, W words.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

MODELS = Path("runs") / "models"
"""The folder of the examples' tiny models, below the current one."""

Chat = list[dict[str, Any]]


def word_token(word: str, *, single_word: bool = False) -> AddedToken:
    """A token for `word`. Spaces around the word in a text belong to the token, and it decodes without them. If it is a
    single word, it is not found inside other words."""
    return AddedToken(word, single_word=single_word, lstrip=True, rstrip=True, normalized=False)


def make_tokenizer(words: Iterable[str | AddedToken], max_length: int = 1024) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, the chat template's roles, and one token for each of `words`.

    A word given as text is a token that keeps the spaces around it: write `" cat"` for a word in a sentence. An
    instruction as a whole may be a word too; a model with another tokenizer reads it as text."""
    # Bytes are spelled as GPT-2 does; no merges: what is no word of the task costs a token a byte.
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, END, *ROLES)])
    tokenizer.add_tokens([AddedToken(word, normalized=False) if isinstance(word, str) else word for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, *, width: int = 192, mlp: int = 512, layers: int = 2
) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights from `seed`; heads have 64 dimensions. The defaults make 0.95 M parameters
    with a vocabulary of 320."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        max_position_embeddings=1024,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def _encoded(tokenizer: PreTrainedTokenizerFast, chats: Sequence[Chat]) -> torch.Tensor:
    """The conversations' tokens [B, T]. Padding is on the right and has no target: causal attention needs no mask."""
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    ids_BT: torch.Tensor = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    return ids_BT


def choice_loss(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    words: Sequence[str],
    taught: Sequence[tuple[Chat, Sequence[Sequence[float]]]],
) -> torch.Tensor:
    """Return the loss of imitating a teacher whose every reply is one of `words`, each of them one token.

    `taught` holds conversations, and for each assistant turn the teacher's probability of each word. The loss is the
    divergence from the teacher in nats a turn, plus the negative logprob of the end token after the word: 0 for a
    perfect imitation."""
    assistant, end = tokenizer.convert_tokens_to_ids([ROLES[2], END])
    word_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(words)))
    ids_BT = _encoded(tokenizer, [chat for chat, _ in taught])
    decides_BT = ids_BT == assistant
    hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state
    ends_BT = torch.roll(decides_BT, 1, dims=1)
    logprobs_NV = model.lm_head(hidden_BTD[decides_BT]).log_softmax(-1)
    shares_NW = torch.tensor([share for _, shares in taught for share in shares])
    divergence_N = -(shares_NW * logprobs_NV[:, word_ids]).sum(-1) - torch.special.entr(shares_NW).sum(-1)
    ends_N = -model.lm_head(hidden_BTD[ends_BT]).log_softmax(-1)[:, end]
    return (divergence_N + ends_N).mean()


def pretrain(model: Qwen3ForCausalLM, loss_of: Callable[[int], torch.Tensor], steps: int) -> None:
    """Train `model` for `steps` steps; step k minimises the loss `loss_of(k)`, which draws a batch of its own. With 0
    steps the weights stay random.

    Muon trains the layers' matrices: it imitates a teacher far better than AdamW alone after equal steps
    (docs/decisions/sdk.md)."""
    if not steps:
        return
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01),
    ]

    def rate(step: int) -> float:
        """Return the factor on the learning rate: it rises over the first twentieth of the steps, and falls from 0.3 of
        them to 0.02 at the end."""
        left = (steps - step) / (0.7 * steps)
        return min((step + 1) / (0.05 * steps + 1), 1.0) * (0.02 + 0.98 * min(left, 1.0))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    started = time.monotonic()
    model.train()
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)


def arguments(doc: str | None, out: Path, *, steps: int) -> argparse.Namespace:
    """Read the flags of an example's `make_model` from the command line: `out`, `seed` and `steps` of pre-training.
    Also lets PyTorch compute with one thread, so that sums have the same order on every machine."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="0: leave the weights random")
    torch.set_num_threads(1)
    return parser.parse_args()


def make(
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerFast,
    loss_of: Callable[[Qwen3ForCausalLM, int], torch.Tensor],
    *,
    width: int = 128,
    mlp: int = 384,
) -> None:
    """Make a model of this width, pre-train it on the loss that `loss_of(model, step)` returns, and save it. `args`:
    from `arguments`."""
    model = make_model(tokenizer, args.seed, width=width, mlp=mlp)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    pretrain(model, lambda step: loss_of(model, step), args.steps)
    save(model, tokenizer, args.out)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model folder. It appears whole or not at all, so a folder that is there can be used."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
