"""`python -m trainer --config <toml>`: the trainer service."""

from pipeline.service import main
from trainer.service import serve

if __name__ == "__main__":
    main("trainer", serve)
