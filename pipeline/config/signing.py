"""`[signing]`: signatures of checkpoints."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Section


class SigningConfig(Section, frozen=True, kw_only=True):
    """Signatures of checkpoints. With them, write access to the log is not enough to have an adapter loaded."""

    seed: str = ""
    """File with the nkey seed that the trainer signs with. `journeyman up` creates one in the run directory."""
    keys: tuple[str, ...] = ()
    """Public nkeys whose checkpoints may be served. `journeyman up` adds the key of `seed`."""
    check: Literal["auto", "require", "off"] = "auto"
    """`auto`: signatures are checked if `keys` is not empty. `require`: the gateway does not start without `keys`.
    `off`: every checkpoint on the log may be served."""
