"""Record a run of the present release for `test_upgrade.py`: `python -m tests.upgrade.record`, at a release, once.

The run trains one step of the demo's model before the inference double. Its backup becomes
`tests/upgrade/<version>.tar.xz`. The keys in it open nothing else. A recording is never changed: it is what a release
wrote."""

import json
import lzma
import tarfile
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kits.installation import JOURNEYWORK, ROOT, SMALL, program, run_groups, up

FOLDER = Path(__file__).parent
GROUPS = 4
SETTINGS = (
    *(s for s in SMALL if "rank" not in s),
    "models.0.name=tictactoe",
    "models.0.base=examples/tictactoe/model",
    "trainer.lora.rank=1",
    "vllm.max_lora_rank=1",
    "judge.group_size=2",
    "trainer.optimizer.learning_rate=2e-3",
)
TABLES = ("rollout_opened", "rollout_exchange", "rollout_completed", "group_scored", "policy_checkpoint")
HISTORY = "SELECT log_seq, epoch_us(log_at) AS at FROM {} ORDER BY ALL"


def record(file: Path) -> None:
    """Write the recording to `file`, which must not exist."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run_dir = folder / "run"
        with up(folder, run_dir, "--run-dir", str(run_dir), settings=SETTINGS) as run:
            run_groups(run.url, "recorded", GROUPS, [])
            run.until_step(1)
        program([*JOURNEYWORK, "backup", str(folder / "backup"), "--run-dir", str(run_dir)], ROOT)
        history = {table: run.query(HISTORY.format(table)) for table in TABLES}
        (folder / "history.json").write_text(json.dumps(history))
        with (
            lzma.open(file, "xb", preset=9 | lzma.PRESET_EXTREME) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as archive,
        ):
            archive.add(folder / "backup", "backup")
            archive.add(folder / "history.json", "history.json")


if __name__ == "__main__":
    record(FOLDER / f"{version('journeywork')}.tar.xz")
