"""What a call of a model holds: its messages, images and sampling settings.

| module | what lives there |
| --- | --- |
| `conversations` | everything of a trajectory that trains, as conversations |
| `demonstrations` | which tokens of a conversation that the model did not have are trained |
| `images` | the images of a recorded call |
| `sampling` | how the tokens of a call were sampled, and which of them are trained |
"""
