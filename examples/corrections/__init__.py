"""An agent that learns from what a user says: tic-tac-toe without any reward.

| module | what lives there |
| --- | --- |
| `user` | a program in the place of a user: it answers a bad move with the right one, in words |
| `make_model` | a tiny base model that follows a move named under the board |
| `train` | each game once, the user's words as feedback, the held-out games before and after |
"""
