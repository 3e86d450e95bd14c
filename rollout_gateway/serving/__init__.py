"""Policy versions and the inference servers that hold them. This room imports `http` and `access`.

| module | what lives there |
| --- | --- |
| `policies` | the versions that exist, from the POLICY stream |
| `promotion` | decisions about which version a model's name stands for |
| `idempotency` | what a repeated request id means |
| `command` | `journeyman policy` |
| `policy_feed` | events of versions for subscribers |
| `routing` | which exact version answers a call |
| `replicas` | the inference servers, the choice among them, and leases on the versions that they hold |
| `members` | keeps the replicas up to date by the log and by health checks; reports the versions in use |
| `fleet_records` | the records of sampler agents and gateways on the log |
| `server_state` | what an inference server tells: health, process, loaded adapters |
| `server_key` | the API key of the inference servers |
| `deadly_requests` | refuses requests that kill their server |
| `pacing` | limits how many groups may be untrained |
"""
