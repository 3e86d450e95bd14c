"""The trainer: scored groups to gradients to committed checkpoints.

| module | what lives there |
| --- | --- |
| `service` | the loop on the log: intake, steps, the commit, recovery |
| `learner` | one policy's line of steps, from groups to a checkpoint on disk |
| `groups` | who counts in a group, advantages, why a group trains nothing |
| `sequences` | exchanges to exact token sequences and masks |
| `packing` | the seam to the model: micro-batches, padded or with shared prefixes |
| `engine` | model, adapter, optimizer: forward and backward passes |
| `grpo` | TRL's losses over captured tokens |
| `checkpoint` | checkpoints on disk, adapters as tars |
"""
