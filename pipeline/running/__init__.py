"""An installation: what it starts, how it watches and restarts it, and where a run keeps its files.

| module | what it holds |
| --- | --- |
| `resolved` | from the settings that a user writes to those that every process starts with |
| `plan` | the processes of an installation: their commands and probes |
| `ports` | free ports, and the check that the settings' ports are free |
| `supervisor` | starts the processes, restarts them, stops them in order |
| `liveness` | the checks that a running process still works |
| `service` | how a service process starts, reports readiness and stops |
| `child` | starts a process that ends with its parent, and ends one that hangs |
| `environment` | the environment variables that each process gets |
| `prepare` | the command `journeywork prepare`: keys and settings for containers |
| `backup`, `restore` | the commands `journeywork backup` and `restore`: a whole installation, stopped |
| `runs` | which run a command means, and how to reach its log |
| `state` | `state.json`: the processes of an installation and their addresses |
| `run_lock` | one installation at a time in a run directory |
| `gateway_api` | the gateway's API, for commands |
| `families` | the tool parser of a model's family |
| `status` | the command `journeywork status` |
| `vllm_guard` | API keys on every path of vLLM |
"""
