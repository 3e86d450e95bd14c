"""The backbone that every service shares and that knows none of them.

| module | what lives there |
| --- | --- |
| `events` | every event on the log, one documented class each; the one schema |
| `names` | identifiers: versions, subject tokens, ids |
| `streams` | the one table of streams, subjects and consumers |
| `broker` | JetStream access: provision, publish, consume, history, objects, dead letters |
| `pull` | bulk delivery for consumers that take everything |
| `crash` | stop points for crash tests |
| `dead` | the `journeyman dead` command |
| `schema`, `docs` | columns and reference pages, read off the code |
| `config` | settings, TOML plus dotted flags |
| `service` | how a service process starts, reports readiness and stops |
| `log` | structured log lines |
| `telemetry` | events to OpenTelemetry spans |
| `supervisor` | starts, watches and restarts the processes of one installation |
| `cli` | the `journeyman` command |
"""
