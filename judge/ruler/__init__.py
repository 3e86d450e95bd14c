"""RULER: a language model compares the trajectories of a group. All but `ruler`, `layout` and `aggregation` also serves
the judge of what happened next (`judge.next_state`).

| module | what it does |
| --- | --- |
| `ruler` | judges a group: several orders, and passes again for the sake of a single one |
| `asking` | calls of the judge model until a reply can be read: budgets, repeated requests, retries, accounting |
| `transcripts` | what the judge reads of a trajectory: everything that trains |
| `layout`, `prompt` | how it is asked: common text once, cut only if it has to be, all of it between nonce
lines |
| `images` | the images of trajectories, attached to a call |
| `replies` | how its replies are parsed |
| `aggregation` | one score per trajectory from several judge passes, without the effect of positions |
| `rubrics` | what a judge looks for: files, identified by their hash |
"""
