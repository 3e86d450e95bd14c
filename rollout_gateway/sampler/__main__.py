"""`python -m rollout_gateway.sampler --config run.toml`: runs the sampler agent."""

from pipeline.running.service import main
from rollout_gateway.sampler.service import check, serve

if __name__ == "__main__":
    main("rollout_gateway.sampler", serve, check)
