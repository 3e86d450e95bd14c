"""The entry point `vllm.general_plugins`. vLLM calls `register` in each of its processes before it loads a model."""

from __future__ import annotations

import logging
import os

SWITCH = "JOURNEYWORK_VLLM_LORA"
"""Environment variable. `off` leaves vLLM's own LoRA kernels in place."""

TESTED = ("0.32.",)
"""Beginnings of the vLLM versions whose classes the replacement was compared with."""

REPLACED = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
REPLACEMENT = "rollout_gateway.vllm_plugin.punica.GroupedPunicaWrapper"

_LOG = logging.getLogger("vllm.journeywork")


def register() -> None:
    """Have vLLM's CPU platform use `GroupedPunicaWrapper`. Nothing happens on another platform, if `SWITCH` is `off`,
    or if another plugin has replaced vLLM's class already; a vLLM of another version is left alone with a warning.
    Calling it again changes nothing."""
    if os.environ.get(SWITCH, "").lower() == "off":
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import __version__ as version

    if not version.startswith(TESTED):
        _LOG.warning("LoRA on CPU is left to vLLM %s; Journeywork's plugin is tested with %s only", version, TESTED)
        return
    wrapper = current_platform.get_punica_wrapper()
    if wrapper == REPLACED:
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: REPLACEMENT)
    elif wrapper != REPLACEMENT:
        _LOG.warning("LoRA on CPU is left to %s; Journeywork's plugin replaces %s only", wrapper, REPLACED)
