"""Environments of other projects as scenarios: `journeywork run-env`.

| module | contents |
| --- | --- |
| `scenarios` | what an environment offers: tasks, and one attempt at a task |
| `from_verifiers` | environments of the package verifiers |
| `from_openenv` | environments that an OpenEnv server offers |
| `command` | the command |
"""
