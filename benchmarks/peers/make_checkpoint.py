"""Write a random checkpoint of nano's size that other engines can run: no engram, no draft stages, no pictures.

    PYTHONPATH=src python benchmarks/peers/make_checkpoint.py FOLDER [--seed 41]

Config and tokenizer are nano's; the weights come from the test oracle's checkpoint maker, in the official layout.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/oracle"))
from make_checkpoint import FIRST_ORDINARY, LATE_TOKENS, Writer, write_backbone  # noqa: E402

DROPPED = ("engram_", "dspark_", "num_nextn_")
END_TOKEN = 1
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def without_extras(config: dict) -> dict:
    """The config of the backbone alone."""
    text = {name: value for name, value in config["text_config"].items() if not name.startswith(DROPPED)}
    text |= {"compress_ratios": text["compress_ratios"][: text["num_hidden_layers"]]}
    text |= {"engram_layer_ids": [], "engram_num_embeddings": [], "num_nextn_predict_layers": 0}
    return {name: value for name, value in config.items() if name != "vision_config"} | {"text_config": text}


def random_weights(text: dict, seed: int) -> dict[str, torch.Tensor]:
    """Tensors by their checkpoint names, in the checkpoint's dtypes."""
    writer = Writer(seed)
    ordinary = text["vocab_size"] - len(LATE_TOKENS) - FIRST_ORDINARY
    write_backbone(writer, text, torch.randperm(ordinary, generator=writer.random) + FIRST_ORDINARY)
    writer.tensors["head.weight"][END_TOKEN] = 0  # never the likeliest token, so no answer ends early
    return {name: value.contiguous() for name, value in writer.tensors.items()}


def make_checkpoint(folder: Path, seed: int) -> None:
    """Write config, tokenizer and weights into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    nano = Path(str(resources.files("deepinfer"))) / "data/deepinfer-nano"
    config = without_extras(json.loads((nano / "config.json").read_text()))
    tensors = random_weights(config["text_config"], seed)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for name in COPIED:
        shutil.copy(nano / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=41)
    args = parser.parse_args()
    make_checkpoint(args.folder, args.seed)


if __name__ == "__main__":
    main()
