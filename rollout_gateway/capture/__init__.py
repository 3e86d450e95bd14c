"""Model calls: finds their trajectory, has them answered, and records them on the log with their exact tokens.

| module | what lives there |
| --- | --- |
| `handler` | one call: sampled, recorded and acknowledged, then answered |
| `dispatch` | has a call answered by an inference server, again if one goes away |
| `exchange` | a call from its request to its events |
| `answer_ids` | ids of answers, which name their trajectory |
| `identity` | finds the trajectory of a call and checks its key |
| `detection` | finds the trajectory of a call that names none, by its messages |
| `conversations` | what the messages of a call say, and what of an answer they quote |
| `waiting_runs` | detected trajectories that wait for their next call, on the log |
| `registry` | the trajectories in memory: found, opened, completed |
| `groups` | whose groups are whose, and how many trajectories they have |
| `trajectory` | one run: its calls are recorded under sequence numbers of their own |
| `copies` | a run made of calls that other runs recorded |
| `masking` | replaces what may not be recorded |
| `run_log` | how runs were opened and completed, read from the log |
"""
