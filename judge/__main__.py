"""`python -m judge --config FILE`."""

from judge.service import check, serve
from pipeline.running.service import main

if __name__ == "__main__":
    main("judge", serve, check)
