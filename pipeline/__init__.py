"""The backbone that every service shares and that knows none of them.

| module | what lives there |
| --- | --- |
| `events` | every event on the log, one documented class each; the one schema |
| `names` | identifiers: versions, subject tokens, ids |
| `streams` | the one table of streams, subjects and consumers |
| `broker` | JetStream access: provision, publish, consume, dead letters |
| `history`, `objects` | reading the log without a consumer; the object store |
| `publisher`, `wire` | nats-py's hot paths done our way: acknowledged publishes, bulk deliveries |
| `pull` | bulk delivery for consumers that take everything |
| `crash` | stop points for crash tests |
| `dead` | the `journeyman dead` command |
| `schema`, `docs` | columns and reference pages, read off the code |
| `config` | settings, TOML plus dotted flags |
| `service` | how a service process starts, reports readiness and stops |
| `log`, `errors` | structured log lines; what the log can raise |
| `telemetry`, `spans` | events to OpenTelemetry spans |
| `plan`, `supervisor` | what an installation runs; starts, watches and restarts it |
| `cli` | the `journeyman` command |
"""
