"""Policy versions and the inference servers that hold them. This room imports `http` and `access`.

| module | what lives there |
| --- | --- |
| `policies` | the versions that exist, read from the stream POLICY |
| `promotion` | decisions about which version a model name is routed to |
| `idempotency` | recognises a repeated request by its idempotency id |
| `command` | `journeywork policy` |
| `routing` | chooses the exact version that answers a call |
| `replicas` | the inference servers, the choice among them, and leases on the versions that they hold |
| `membership` | adds and removes replicas, checks their health, reports the versions in use |
| `fleet_records` | the records of sampler agents and gateways on the log |
| `server_state` | reads an inference server's health, process start time and loaded adapters |
| `pacing` | limits how many groups may be untrained |
"""
