"""An installation on this machine.

| module | contents |
| --- | --- |
| `backend` | `LocalBackend`, which joins an installation or starts one |
| `finetuning` | supervised fine-tuning of a model of the installation, for `train_sft` |
"""

from journeywork.art.local.backend import LocalBackend, UpError

__all__ = ["LocalBackend", "UpError"]
