"""Code that all services share. It imports none of them.

| room or module | what lives there |
| --- | --- |
| `config` | settings: one documented class per section, TOML and dotted flags |
| `events` | every event on the log, one documented class each, and their columns |
| `log` | access to the log in NATS JetStream |
| `security` | nkeys, NATS users, signatures of checkpoints |
| `running` | starts, checks and restarts the processes of an installation |
| `commands` | the command `journeywork` |
| `telemetry` | log lines |
| `tracing` | traces from the events |
| `chat` | what a call of a model holds: messages, images, sampling settings |
| `versions` | where versions of a policy are: in the lake, on inference servers |
| `statistics` | figures that several services show |
| `terminal` | parsers of commands; text that is safe to print |
| `concurrency` | concurrent work over a list, pauses between attempts |
| `streams` | the table of streams, consumers and buckets |
| `names` | identifiers and their form in NATS subjects |
| `files` | atomic and durable writes of files |
| `errors` | errors that a command prints as one line |
| `crash` | crash points for tests |
| `docs` | renders reference pages of this package |
"""
