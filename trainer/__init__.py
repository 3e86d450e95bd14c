"""The trainer: scored groups to gradients to committed checkpoints.

| module | what lives there |
| --- | --- |
| `service` | the loop on the log: intake, batches, steps |
| `commits` | where disk and log meet: publishing a step, recovery at start |
| `learner` | one policy's line of steps, from groups to a checkpoint on disk |
| `groups` | who counts in a group, advantages, why a group trains nothing |
| `sequences` | exchanges to exact token sequences and masks |
| `packing` | the seam to the model: micro-batches, padded or with shared prefixes |
| `engine` | model, adapter, optimizer: forward and backward passes |
| `attention` | how a prefix tree is attended over: SDPA with a mask, or FlexAttention |
| `parallel` | several processes that share the passes of a step |
| `loading` | base models and fresh adapters, by Transformers or Unsloth |
| `grpo` | TRL's losses over captured tokens |
| `measure`, `checks` | what a step measures of itself |
| `checkpoint` | checkpoints on disk, adapters as tars |
| `train`, `export`, `sft`, `cli` | the commands `journeyman train`, `export`, `sft`, and what they share |
"""

import os

# TRL and Unsloth report their use to Hugging Face as they start, from a thread of their own; set these to have it so.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
