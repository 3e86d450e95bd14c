"""Groups completed trajectories and scores them; docs/judging.md explains it to users.

| module | what it does |
| --- | --- |
| `service` | the process: consumes `rollout.completed`, publishes `group.scored` and `group.discarded` |
| `groups` | which trajectories belong together and when a group closes |
| `scoring` | from a closed group to its event: agents' own rewards, or what a composer says |
| `compose` | rewards of several parts: agents', metrics, Python functions, RULER with rubrics |
| `sandbox`, `sandbox_worker`, `confine` | Python reward functions in a process of their own, without network and files |
| `ruler` | RULER: calls, asking again, several orders, subsets, retries, accounting |
| `conversations`, `transcripts` | what of a trajectory a judge reads: all that trains |
| `layout`, `budget`, `prompt` | how it is asked: what is common once, nothing cut while there is room, all of it fenced |
| `lenient_json`, `replies` | how its answer is read |
| `merge` | several judgings to one score, without the effect of places |
| `rubrics`, `rubrics/` | what a judge looks for: files, named by their hash |
| `llm`, `params`, `callers` | the judge model, through litellm's router, here or in processes of their own |
| `score` | one group from a file or from user code; `journeyman judge score` |
| `cli` | the commands `journeyman judge …` |
| `labelled`, `eval` | agreement with ground truth; `journeyman judge eval` |
| `watch` | anchors judged again and again, the alarm, `judge.json`, `group.measured` |
| `rejudge` | history scored again as a verdict set; `journeyman rejudge` |
| `scenarios` | tasks to train on from a description; `journeyman scenarios` |
"""
