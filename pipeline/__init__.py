"""Code that all services share. It imports none of them.

| room or module | what lives there |
| --- | --- |
| `config` | settings: one documented class per section, TOML and dotted flags |
| `events` | every event on the log, one documented class each, and their columns |
| `log` | access to the log in NATS JetStream |
| `security` | nkeys, NATS users, signatures of checkpoints |
| `running` | starts, checks and restarts the processes of an installation |
| `telemetry` | log lines, and traces from the events |
| `commands` | commands whose code is in another folder |
| `streams` | the table of streams, consumers and buckets |
| `lake_files` | where the lake keeps versions; opens object storage |
| `files` | atomic and durable writes of files |
| `conversations` | everything of a trajectory that trains, as conversations |
| `demonstrations` | which tokens of a conversation that the model did not have are trained |
| `images` | the images of a recorded call |
| `sampling` | how the tokens of a call were sampled, and which of them are trained |
| `names` | identifiers and their form in NATS subjects |
| `metric_names` | the names of the trainer's metrics in curves and answers |
| `loaded` | which versions the inference servers have loaded |
| `rewards` | how the parts of a reward become one number |
| `intervals` | 95 % intervals of means, and of their differences |
| `progress` | whether the training reward moved, in a sentence |
| `sequential` | intervals of a mean that hold however often one looks |
| `errors` | errors that a command prints as one line |
| `printing` | makes text of agents and models safe to print on a terminal |
| `command_line` | the parsers of commands, and how an error ends a command |
| `backoff` | pauses between attempts |
| `gather` | concurrent work over a list |
| `crash` | crash points for tests |
| `docs` | renders reference pages of this package |
| `cli` | the command `journeywork` |
"""
