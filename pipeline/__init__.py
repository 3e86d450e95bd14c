"""What every service shares. It imports none of them.

| room or module | what lives there |
| --- | --- |
| `config` | settings: one documented class per section, TOML and dotted flags |
| `events` | every event on the log, one documented class each, and their columns |
| `log` | access to the log in NATS JetStream |
| `security` | nkeys, NATS users, signatures of checkpoints |
| `running` | an installation: what it starts, watches and restarts |
| `telemetry` | log lines, and traces from the events |
| `commands` | commands that live in a folder of their own |
| `streams` | the table of streams, consumers and buckets |
| `files` | writing a file whole, and syncing it |
| `names` | identifiers and their form in NATS subjects |
| `errors` | errors that a command prints as one line |
| `arguments` | types of command-line arguments |
| `backoff` | pauses between attempts |
| `gather` | concurrent work over a list |
| `crash` | crash points for tests |
| `docs` | the generated pages of `docs/` |
| `cli` | the command `journeyman` |
"""
