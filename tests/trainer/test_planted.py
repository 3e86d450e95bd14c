"""A planted task of five calls in which only the second can be learned: what rewards per call save in steps.

The reward of a run is whether its second call is right, plus four tosses of a coin. Only the second call has a
reward of its own: whether it is right. Where each other call is rewarded by its coin too, rewards per call save less.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import LoraConfig, LossConfig, OptimizerConfig, TrainerConfig
from pipeline.events import GroupScored, Member
from tests.trainer.kit import VOCAB, exchange, make_model, training_group
from trainer.batches.groups import examples
from trainer.batches.sequences import build
from trainer.engine.engine import Engine

CALLS, GROUPS, SIZE = 5, 2, 8
GOAL, STEPS = 0.8, 100
GOOD = torch.arange(2, VOCAB, 4)
"""Tokens that are right in the second call. A run's reward has the luck of the other calls in it: tosses of a coin."""


def asked(call: int) -> int:
    """The token with which the environment asks for a call's answer, which is one token."""
    return 2 + call


def success(engine: Engine) -> float:
    """The exact probability that the second call is right: over all answers of the first."""
    first = engine.model.peft(input_ids=torch.tensor([[asked(0)]])).logits[0, -1].softmax(-1)
    prompts = torch.stack([torch.tensor([asked(0), token, asked(1)]) for token in range(VOCAB)])
    second = engine.model.peft(input_ids=prompts).logits[:, -1].softmax(-1)
    return float(first @ second[:, GOOD].sum(1))


def steps_to_goal(folder: Path, seed: int, per_call: bool) -> int:
    """The number of steps after which the second call is right with the probability `GOAL`, at most `STEPS`."""
    config = TrainerConfig(
        logprob_bound=1e9, seed=seed, lora=LoraConfig(rank=4), optimizer=OptimizerConfig(learning_rate=0.003),
        loss=LossConfig(turn_discount=0.0 if per_call else 1.0),
    )  # fmt: skip
    engine = Engine(make_model(folder / "model", seed), config, folder / "state")
    state, sampler, coin = (
        engine.initial_state(),
        torch.Generator().manual_seed(seed),
        np.random.default_rng(seed),
    )
    count = GROUPS * SIZE
    for step in range(STEPS):
        engine.model.load_adapter(state.weights)
        ids, logprobs = torch.zeros((count, 0), dtype=torch.long), []
        with torch.no_grad():
            if success(engine) >= GOAL:
                return step
            for call in range(CALLS):
                ids = torch.cat([ids, torch.full((count, 1), asked(call))], 1)
                of_tokens = engine.model.peft(input_ids=ids).logits[:, -1].log_softmax(-1)
                answers = torch.multinomial(of_tokens.exp(), 1, generator=sampler)
                logprobs.append(of_tokens.gather(1, answers))
                ids = torch.cat([ids, answers], 1)
        batch = []
        for group in range(GROUPS):
            members, sequences = [], []
            for run in range(group * SIZE, (group + 1) * SIZE):
                rewards = coin.integers(0, 2, CALLS).astype(float)
                rewards[1] = float(ids[run, 3] in GOOD)
                of_calls = {"1": float(rewards[1])} if per_call else {}
                members.append(
                    Member(
                        trajectory=f"r{run}", reward=0.0 if per_call else float(rewards.sum()),
                        call_rewards=of_calls, exchanges=CALLS, first_step=step, last_step=step,
                    )
                )  # fmt: skip
                tokens = ids[run].tolist()
                sequences += build(f"r{run}", [
                    exchange(
                        f"r{run}", call, tokens[: 2 * call + 1], [tokens[2 * call + 1]],
                        logprobs=[float(logprobs[call][run])], step=step,
                    )
                    for call in range(CALLS)
                ])  # fmt: skip
            scored = GroupScored(
                project="p", group=f"g{group}", model="tiny", judge="j", members=tuple(members)
            )
            batch.append(training_group(scored, sequences))
        state = engine.step(
            state, examples(batch, config), [i for i, g in enumerate(batch) for _ in g.sequences or ()]
        ).state
    return STEPS


@pytest.mark.timeout(300)
def test_rewards_of_calls_learn_the_call_that_matters_in_half_the_steps(tmp_path: Path) -> None:
    steps = {
        per_call: [steps_to_goal(tmp_path / f"{seed}-{per_call}", seed, per_call) for seed in range(20, 25)]
        for per_call in (True, False)
    }
    assert max(steps[True]) < STEPS
    assert 2 * sum(steps[True]) <= sum(steps[False]), steps
