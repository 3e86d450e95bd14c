"""Groups completed trajectories and scores them.

| module | what it does |
| --- | --- |
| `service` | the process: consumes `rollout.completed`, publishes `group.scored` and `group.discarded` |
| `groups` | which trajectories belong together and when a group closes |
| `scoring` | from a closed group to its event: agents' own rewards, or RULER's |
"""
