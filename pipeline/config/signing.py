"""`[signing]`: signatures of checkpoints."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Section


class SigningConfig(Section, frozen=True, kw_only=True):
    """Signatures of checkpoints: with them, who can write to the log still can't have an adapter loaded."""

    seed: str = ""
    """File with the nkey seed that the trainer signs with. `journeyman up` makes one in the run directory."""
    keys: tuple[str, ...] = ()
    """Public nkeys whose checkpoints may be served. `journeyman up` adds that of `seed`."""
    check: Literal["auto", "require", "off"] = "auto"
    """`auto`: signatures are checked where `keys` is not empty; `require`: the gateway does not start without `keys`; `off`:
    every checkpoint on the log may be served."""
