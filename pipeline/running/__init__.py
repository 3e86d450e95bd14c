"""An installation: what it starts, how it watches and restarts it, and where it keeps its files.

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
| `installations` | which installation a command means, its settings, and how to reach its log |
| `state` | `state.json`: the processes of an installation and their addresses |
| `folder_lock` | one set of processes at a time in an installation's folder |
| `gateway_api` | the gateway's API, for commands |
| `families` | the tool parser of a model's family |
| `vllm_guard` | API keys on every path of vLLM |
"""
