"""Policy versions and the inference servers that hold them. This room imports `http` and `access`.

| module | what lives there |
| --- | --- |
| `policies` | the versions that exist, from the POLICY stream |
| `promotion` | decisions about which version a model's name stands for |
| `idempotency` | what a repeated request id means |
| `command` | `journeyman policy` |
| `policy_feed` | events of versions for subscribers |
| `routing` | which exact version answers a call |
| `replicas` | the servers, and leases on the versions that they hold |
| `adapters` | keeps the servers: health, loading, unloading |
| `adapter_api` | the servers' adapter API, and the probe that an adapter changes something |
| `adapter_files` | adapters on this machine's disk |
| `deadly_requests` | refuses requests that kill their server |
| `pacing` | limits how many groups may be untrained |
"""
