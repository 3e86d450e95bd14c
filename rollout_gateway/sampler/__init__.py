"""The sampler agent: a process beside inference servers that loads adapters into them. This room imports `http` and
`serving`.

Gateways and inference servers share no disk: the agent downloads adapters from the object store into a folder that its
servers read. It registers each server on the log, and gateways send calls to the registered servers
(docs/decisions/0054-sampler-agents.md).

| module | what lives there |
| --- | --- |
| `service` | the agent as a service: `journeyman sampler` |
| `keeper` | keeps one inference server: loads, probes and unloads adapters, registers the server |
| `gateways` | the versions that gateways use, by their records on the log |
| `adapter_files` | adapters on this machine's disk |
| `adapter_api` | loading and unloading in a server, and the probe that an adapter changes something |
"""
