"""A plugin for vLLM on CPU: the LoRA layers multiply once per adapter in the batch.

vLLM's own kernels for CPU copy the adapter's matrices once per token and layer before they multiply. vLLM finds the
plugin by the entry point `vllm.general_plugins` of the installed package `journeywork` and runs it in each of its
processes. docs/decisions/gateway.md has the reason and the figures.

This room runs inside vLLM, so it imports nothing of Journeywork.

| module | what lives there |
| --- | --- |
| `register` | the entry point: installs the layers' arithmetic, on CPU only, unless it is switched off |
| `grouped` | rows grouped by adapter, and the two matrix products of a group |
| `punica` | vLLM's interface of that arithmetic |
"""
