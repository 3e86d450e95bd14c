"""`make apprentice`: an agent starts on a provider's model, and a small model of one's own learns its job.

| module | contents |
| --- | --- |
| `master` | the provider: a scripted server with a price, right in 95 % of cases |
| `demo` | the program: master, its runs as data set, the apprentice by supervised and then reinforcement learning |
| `takeover` | the second half: unseen beside the master, then in its place by evidence |
| `prompts` | what another prompt adds to the base model and to the last version |

The job, its agent and the training are those of `examples.inbox`.
"""
