"""A base model that knows of each program what it may reply, and nothing else.

Its chat template ends a prompt with a token of its program. After that token each of the program's replies is as likely
as the others, and after a reply comes the end: attention has no part in it, so prompts may have any length."""

# ruff: noqa: N806 - tensors' names end in their shape: N pairs of tokens, V vocabulary
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.common import tiny
from tests.journeywork.art.programs import Program

LENGTH = 8192
"""Tokens of prompt and reply together."""


def make_base(folder: Path, programs: Sequence[Program], steps: int) -> None:
    """Write the model. With `steps` 0 it has random weights."""
    topics = {program.about: f"<|{number}|>" for number, program in enumerate(programs)}
    replies = {topics[program.about]: program.replies for program in programs}
    words = sorted({*topics.values(), *(reply for said in replies.values() for reply in said)})
    tokenizer = tiny.make_tokenizer(words, LENGTH)
    choice = "".join(
        f"{{%- {'elif' if number else 'if'} {json.dumps(about)} in said -%}}{{{{- {json.dumps(topic)} -}}}}"
        for number, (about, topic) in enumerate(topics.items())
    )
    said = "{%- set said = messages | map(attribute='content') | select('string') | join(' ') -%}"
    macro = f"{{%- macro topic(said) -%}}{choice}{{%- endif -%}}{{%- endmacro -%}}"
    template = (
        tiny.CHAT_TEMPLATE.replace(
            "+ (message.content or '')",
            "+ (topic(said) if message.role == 'assistant' else '') + (message.content or '')",
        )
        .replace("'<|assistant|>' -}}", "'<|assistant|>' + topic(said) -}}")
        .replace(
            "call.function | tojson",
            """'{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}'""",
        )
    )
    tokenizer.chat_template = macro + said + template
    model = tiny.make_model(tokenizer, 0, width=128, mlp=384)
    model.config.max_position_embeddings = LENGTH
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        layer.self_attn.o_proj.weight.requires_grad_(requires_grad=False)
    # What follows a program's token, and what follows a reply.
    pairs = [(topic, reply) for topic, said in replies.items() for reply in said]
    ids_N2 = torch.tensor([tokenizer.convert_tokens_to_ids(list(pair)) for pair in pairs])
    next_N2 = torch.stack([ids_N2[:, 1], torch.full((len(pairs),), tokenizer.eos_token_id)], dim=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        logits_N2V = model(input_ids=ids_N2).logits
        torch.nn.functional.cross_entropy(logits_N2V.flatten(0, 1), next_N2.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tiny.save(model, tokenizer, folder)
