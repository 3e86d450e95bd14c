"""The trainer's commands.

| module | what lives there |
| --- | --- |
| `train` | `journeyman train`: the trainer alone, on a log that runs elsewhere |
| `export` | `journeyman export`: a policy as an adapter or as merged weights |
| `sft` | `journeyman sft`: supervised warm start |
| `check_model` | `journeyman check-model`: whether a base model trains right on this machine |
| `cli` | what the commands share: arguments, the run they mean, exit codes |
"""
