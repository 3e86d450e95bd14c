"""The losses written out from their papers, token by token: nothing of TRL's, nothing of ours.

A reply i has advantage A, and for each token t the trainer's logprob p, the sampler's q and the base model's b. In a
step of several updates there is also the logprob o that the trainer gave it before the first one. All are scalars
(`torch` for the gradient with respect to p). `stop` is the stop-gradient of the papers. Names of settings are those of
[trainer].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.config import TrainerConfig

Scalar = torch.Tensor


@dataclass(frozen=True)
class Reply:
    """One trained sequence."""

    advantage: float
    p: Sequence[Scalar]
    q: Sequence[float]
    b: Sequence[float]
    entropy: Sequence[Scalar]
    o: Sequence[float] | None = None

    @property
    def before(self) -> list[Scalar]:
        """The logprobs of the policy that the step began with."""
        return [stop(p) for p in self.p] if self.o is None else [torch.tensor(o, dtype=torch.float64) for o in self.o]


def stop(x: Scalar) -> Scalar:
    return x.detach()


def clip(x: Scalar, low: float, high: float) -> Scalar:
    return torch.clamp(x, low, high)


def corrections(reply: Reply, c: TrainerConfig) -> list[Scalar]:
    """The factor of each token that makes up for the sampler's being another policy; 1 without a correction."""
    one = torch.ones((), dtype=torch.float64)
    if c.loss.importance_sampling == "none":
        return [one for _ in reply.p]
    rho = [torch.exp(o - q) for o, q in zip(reply.before, reply.q, strict=True)]
    if c.loss.importance_sampling.startswith("sequence"):
        product = torch.exp(sum((torch.log(r) for r in rho), torch.zeros((), dtype=torch.float64)))
        rho = [product for _ in rho]
    low = c.loss.importance_clip_min if c.loss.importance_clip_min is not None else 0.0
    if c.loss.importance_sampling.endswith("truncate"):
        return [clip(r, low, c.loss.importance_clip) for r in rho]
    return [r if low <= float(r) <= c.loss.importance_clip else 0.0 * one for r in rho]


def ratios(reply: Reply, c: TrainerConfig) -> list[Scalar]:
    """Probability ratio of every token to the policy that the step began with: the sampler, or, where the sampler is
    corrected for, the trainer before the first update. In a step of one update that is the trainer itself, whose ratio
    is 1 and has a gradient."""
    old = reply.q if c.loss.importance_sampling == "none" else reply.before
    logs = [p - o for p, o in zip(reply.p, old, strict=True)]
    if c.loss.importance_level == "sequence":  # GSPO: the geometric mean over the reply
        mean = sum(logs[1:], logs[0]) / len(logs)
        logs = [mean for _ in logs]
    return [torch.exp(x) for x in logs]


def policy_terms(reply: Reply, c: TrainerConfig) -> list[Scalar]:
    """What each token adds to the loss before it is averaged."""
    a, r, w = reply.advantage, ratios(reply, c), corrections(reply, c)
    high = c.loss.epsilon_high if c.loss.epsilon_high is not None else c.loss.epsilon
    out = []
    for t, p in enumerate(reply.p):
        if c.loss.type == "cispo":  # MiniMax-M1: the ratio is bounded and not differentiated
            bound = c.loss.epsilon_high if c.loss.epsilon_high is not None else 5.0
            term = -stop(torch.clamp(r[t], max=bound)) * a * p
        elif c.loss.type == "sapo":  # a soft gate in place of the clip; a temperature for each sign
            tau = c.loss.options.get(*(("sapo_temperature_pos", 1.0) if a > 0 else ("sapo_temperature_neg", 1.05)))
            term = -(4 / tau) * torch.sigmoid(tau * (r[t] - 1)) * a
        elif c.loss.type == "vespo":  # a Gamma weight of the whole reply's ratio to the sampler
            side = "pos" if a >= 0 else "neg"
            k = c.loss.options.get(f"vespo_k_{side}", 2.0 if a >= 0 else 3.0)
            lam = c.loss.options.get(f"vespo_lambda_{side}", 3.0 if a >= 0 else 2.0)
            whole = torch.ones((), dtype=torch.float64)
            for rt, wt in zip(r, w, strict=True):
                whole = whole * stop(rt) * wt
            whole = clip(whole, 1e-8, float(torch.exp(torch.tensor(20.0, dtype=torch.float64))))
            term = -torch.exp(lam - lam * whole) * whole**k * a * p
        else:
            clipped = clip(r[t], 1 - c.loss.epsilon, 1 + high)
            free = r[t] if c.loss.delta is None else torch.clamp(r[t], max=c.loss.delta)
            term = -torch.minimum(free * a, clipped * a)
        if c.loss.off_policy_mask is not None and a < 0:  # DeepSeek-V3.2
            drift = sum(q - float(stop(x)) for q, x in zip(reply.q, reply.p, strict=True)) / len(reply.p)
            if drift > c.loss.off_policy_mask:
                term = 0.0 * term
        if c.loss.type != "vespo":
            term = term * w[t]
        if c.loss.beta:
            k3 = torch.exp(reply.b[t] - p) - (reply.b[t] - p) - 1
            term = term + c.loss.beta * k3 * (r[t] if c.loss.kl_unbiased else 1.0)
        out.append(term)
    return out


def loss(replies: Sequence[Reply], c: TrainerConfig) -> Scalar:
    """The loss of a batch."""
    terms = [policy_terms(reply, c) for reply in replies]
    sums = [sum(t[1:], t[0]) for t in terms]
    tokens = sum(len(t) for t in terms)
    total = sum(sums[1:], sums[0])
    if c.loss.type in ("grpo", "sapo"):  # mean over replies of means over tokens
        means = [s / len(t) for s, t in zip(sums, terms, strict=True)]
        out = sum(means[1:], means[0]) / len(replies)
    elif c.loss.type == "dr_grpo":  # a constant in place of the length
        out = total / (len(replies) * c.loss.max_completion_length)
    elif c.loss.type == "luspo":  # mean over replies of sums over tokens
        out = total / len(replies)
    else:  # mean over the batch's tokens
        out = total / tokens
    every = [h for reply in replies for h in reply.entropy]
    return out - c.loss.entropy_coef * sum(every[1:], every[0]) / tokens
