"""The sampler agent: a process beside inference servers that loads adapters into them. This room imports `http` and
`serving`.

Gateways and inference servers need no shared disk: the agent downloads adapters from the object store into a folder
that its servers read. It registers each server on the log, and gateways send calls to the registered servers
(docs/decisions/gateway.md).

| module | what lives there |
| --- | --- |
| `service` | the agent as a service: `journeywork sampler` |
| `controller` | controls one inference server: loads, probes and unloads adapters, registers the server |
| `registration` | the record of an inference server on the log, by which gateways know it |
| `gateway_records` | reads which versions gateways use, from their records on the log |
| `adapter_files` | downloads adapters to this machine's disk |
| `adapter_api` | loads and unloads adapters in a server, and probes that an adapter changes its logprobs |
"""
