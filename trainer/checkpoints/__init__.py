"""Checkpoints of steps, on disk and on the log.

| module | what lives there |
| --- | --- |
| `checkpoint` | checkpoints on disk, adapters as tars |
| `tensors` | what the files of a checkpoint hold, as tensors |
| `commits` | the commit protocol: publishing a step |
| `compatibility` | whether training can continue from a checkpoint |
| `start` | versions in a lake: what training begins with, and what left the disk |
| `consumed` | the groups that are done with, so that none is trained twice |
| `validation` | rewards of validation runs, and the best checkpoint by them |
"""
