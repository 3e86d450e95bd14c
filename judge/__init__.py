"""Groups completed trajectories and scores them. docs/judging.md explains it to users.

| module | what it does |
| --- | --- |
| `service` | the process: consumes `rollout.completed`, publishes `group.scored` and `group.discarded` |
| `groups` | what the log says of a group: its members, and what closed it |
| `group_log` | reads of groups from the log; deadlines and late trajectories |
| `scoring` | from a closed group to its event |
| `reward_parts` | how the parts of a reward become one number |
| `errors` | errors that several rooms raise |
| `limits` | whether learning is over budget |
| `feedback` | what signals say about a run: values, rewards of calls, hints, graders |
| `next_state` | a judge model scores calls by what followed them: votes, hints |
| `teacher` | asks a teacher from outside, puts its logprobs on the log |
| `comparing` | compares an outside model's answer and a policy's: shadow calls, corrections |
| `healing` | has an outside model correct the call at fault of low runs |
| `monitor` | whether the judge can be trusted: anchors, the alarm, `group.measured` |
| `labelled` | groups from files; agreement with known rewards |
| `ruler` | room: a judge model compares trajectories |
| `rewards` | room: rewards of several parts, Python functions in a sandbox |
| `models` | room: calls of the judge model |
| `commands` | room: commands for users |
"""
