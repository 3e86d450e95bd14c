"""`python -m rollout_gateway --config <toml>`."""

from pipeline.running.service import main
from rollout_gateway.service import check, serve

if __name__ == "__main__":
    main("rollout_gateway", serve, check)
