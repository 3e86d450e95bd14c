"""From scored groups to the batch of a step.

| module | what lives there |
| --- | --- |
| `groups` | the stages of a group on its way to a batch, why one is refused, and a step's metrics of its groups |
| `examples` | a batch of groups to sequences with advantages |
| `returns` | returns of calls, where rewards belong to single calls |
| `tasks` | returns of the earlier runs of a task, as the baseline of runs without a group |
| `graders` | a cap on the share of a step that feedback of one API key has |
| `histories` | reads a group's exchanges from the log |
| `sampling` | a server's sampling defaults, and the sampler's distribution from the trainer's logits |
| `packing` | sequences to micro-batches, padded or with shared prefixes |
"""
