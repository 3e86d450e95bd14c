"""`make demo`: a language model of 135 million parameters learns to sort a shop's inbox.

| module | contents |
| --- | --- |
| `messages` | the messages, what is right about each, the reward |
| `agent` | the agent: an OpenAI client that asks for one message's team, urgency and order |
| `demo` | the program: warm start by examples, reinforcement learning, held-out messages before and after |
| `report` | what the program prints and writes |
"""
