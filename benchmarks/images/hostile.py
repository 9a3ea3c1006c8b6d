"""What damaged and very large image files cost: seconds and memory of one process.

    PYTHONPATH=src:tests python benchmarks/images/hostile.py [--files 1000] [--seed 0]

First, files that are changed at random (tests/images/fuzz.py); then files made to cost more than their picture
(tests/images/bombs.py), as large as a file may be; then ones of as many pixels as an image may have, which take the
longest, whatever the size of the file. Each kind runs in a process of its own, so that the peak is its.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import time
from collections import Counter
from collections.abc import Callable

from PIL import Image

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.images.decode import MAX_SCANS
from deepinfer.images.prepare import ImagePreparer
from images.bombs import BOMBS, deep, scans
from images.fuzz import files, mutated
from images.pictures import encoded, geometry, picture

WIDTH, HEIGHT = 7680, 4320  # 33.2 million pixels, the default limit is 33.6
LARGE: dict[str, Callable[[], bytes]] = {
    "png": lambda: encoded(large(), "PNG", compress_level=1),
    "png, 16 bits and alpha, nothing in it": lambda: deep(WIDTH, HEIGHT),
    "png with alpha": lambda: encoded(large().convert("RGBA"), "PNG", compress_level=1),
    "jpeg": lambda: encoded(large(), "JPEG"),
    "jpeg, progressive": lambda: encoded(large(), "JPEG", progressive=True),
    "jpeg, scans up to the limits": lambda: scans(picture(WIDTH, HEIGHT), 12),
    "jpeg, empty scans": lambda: scans(Image.new("RGB", (WIDTH, HEIGHT)), MAX_SCANS - 11),
    "jpeg, rotated": lambda: encoded(large(), "JPEG", exif=rotated()),
    "webp": lambda: encoded(large(), "WEBP", method=0),
    "webp, lossless": lambda: encoded(large(), "WEBP", lossless=True, method=0, quality=0),
    "gif": lambda: encoded(large().quantize(64), "GIF"),
}


def large() -> Image.Image:
    return picture(WIDTH, HEIGHT)


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def damaged(num_files: int, seed: int, model: str) -> str:
    draw, sound = random.Random(seed), files()
    preparer = ImagePreparer(geometry(model), ImageOptions())
    before, slowest, causes = peak_mib(), 0.0, Counter[str]()
    for _ in range(num_files):
        file = mutated(draw.choice(sound), draw)
        started = time.perf_counter()
        try:
            preparer.prepare(file, "it")
            causes["taken"] += 1
        except RequestError as error:
            causes[str(error).partition("(")[0].strip()[:40]] += 1
        slowest = max(slowest, time.perf_counter() - started)
    parts = ", ".join(f"{count} {cause!r}" for cause, count in causes.most_common(6))
    return f"{num_files} files, slowest {slowest:.3f} s, peak {before:.0f} -> {peak_mib():.0f} MiB: {parts}"


def made_up(name: str, model: str) -> str:
    file = BOMBS[name](ImageOptions().max_image_bytes - 2**16)
    preparer = ImagePreparer(geometry(model), ImageOptions())
    before, started, cause = peak_mib(), time.perf_counter(), "taken"
    try:
        preparer.prepare(file, "it")
    except RequestError as error:
        cause = str(error)[:60]
    seconds = time.perf_counter() - started
    return f"{len(file) / 2**20:.1f} MiB, {seconds:.2f} s, peak {before:.0f} -> {peak_mib():.0f} MiB: {cause}"


def sound(file: bytes, model: str) -> str:
    preparer = ImagePreparer(geometry(model), ImageOptions(max_image_bytes=2**30))
    before, started = peak_mib(), time.perf_counter()
    preparer.prepare(file, "it")
    seconds = time.perf_counter() - started
    return f"{len(file) / 2**20:.1f} MiB, {seconds:.2f} s, peak {before:.0f} -> {peak_mib():.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="flash", choices=("nano", "flash"))
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, maxtasksperchild=1) as pool:
        print("damaged:", pool.apply(damaged, (args.files, args.seed, args.model)))
        for name in BOMBS:
            print(f"{name}:", pool.apply(made_up, (name, args.model)), flush=True)
        for name, make in LARGE.items():
            print(f"{name}, {WIDTH} x {HEIGHT}:", pool.apply(sound, (make(), args.model)), flush=True)


if __name__ == "__main__":
    main()
