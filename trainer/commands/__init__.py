"""The trainer's commands.

| module | what lives there |
| --- | --- |
| `train` | `journeywork train`: the trainer alone, on a log that runs elsewhere |
| `export` | `journeywork export`: a policy as an adapter or as merged weights |
| `check_model` | `journeywork check-model`: whether a base model trains right on this machine |
| `options` | what the commands share: arguments, the run they mean, exit codes |
"""
