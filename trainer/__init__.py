"""The trainer: scored groups to gradients to committed checkpoints.

| module or room | what lives there |
| --- | --- |
| `service` | the service: recovery, batches, steps |
| `intake` | scored groups from the log into the queues |
| `queues` | the groups of a model that wait for a step |
| `requested` | batches that agents request, until all their groups are there |
| `sequences` | exchanges to exact token sequences and loss masks |
| `staleness` | how old tokens may be when they are trained, and which versions are kept for them |
| `recovery` | the start: from disk and log to the newest committed step |
| `retention` | removal of adapters and events that nothing needs any more |
| `lease` | one trainer of a branch trains, others wait |
| `gpu_turns` | one GPU that the inference server and the trainer use by turns |
| `learner` | one policy: from a batch of groups to a checkpoint on disk |
| `batches` | from scored groups to the batch of a step |
| `engine` | model, adapter, optimizer, losses: from a batch to gradients |
| `distillation` | what a teacher is asked, and the divergence from it |
| `checkpoints` | checkpoints on disk, the commit protocol |
| `datasets` | a step on a data set, by TRL's trainers; a step that adopts another branch's version |
| `trl_trainers` | imports TRL without vLLM; its supervised trainers on a CPU |
| `commands` | `journeywork train`, `export`, `check-model` |
| `tiny` | tokenizers that know the words of a task, a small Qwen3, and its pre-training |
| `first` | what has to be imported before everything else |
"""

import os

# TRL and Unsloth report their use to Hugging Face from a thread when they are imported. A value in the environment
# wins.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
