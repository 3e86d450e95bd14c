"""The crash matrix: services die at seeded points while agents work, and nothing may be lost or doubled.

| module | contents |
| --- | --- |
| `matrix` | settings, the schedule of deaths, and the run of everything |
| `fork_server`, `processes` | processes of services that start in milliseconds: the server, and the test's side of it |
| `points` | the crash points of the services |
| `agents` | agents that repeat what was not answered |
| `checks` | what must hold in the end |
"""
