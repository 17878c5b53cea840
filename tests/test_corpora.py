"""Folders of public images: packer reads every image that Pillow reads, with Pillow's pixels, within 2 GiB.

The folders are named in CORPORA, separated by blanks: `make test-corpora CORPORA='DIR DIR'`. Download, for example, the
test images of python-pillow/Pillow, image-rs/jpeg-decoder, recurser/exif-orientation-examples,
libjpeg-turbo/seed-corpora, link-u/avif-sample-images, AOMediaCodec/av1-avif, libjxl/conformance and
bigcat88/pillow_heif. `tests/corpus_worker.py` documents the comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from image_cases import encoded, picture
from PIL import Image

WORKER = Path(__file__).with_name("corpus_worker.py")
ROOT = WORKER.parent.parent
FILES_A_PROCESS = 200
TIMEOUT_S = 900
WRONG = ("refused", "differs", "crashed", "died")
CORPORA = [Path(text).expanduser() for text in os.environ.get("CORPORA", "").split()]
COLUMNS = ("files", "Pillow", "same", "by name", "refused", "differ", "crash", "neither", "alone", "peak MB")


def examined(files: list[Path]) -> list[dict[str, str | int]]:
    """The worker's verdict on each file, with some files a process; "died" for a file that ended the process."""
    words: list[dict[str, str | int]] = []
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    while files:
        some = files[:FILES_A_PROCESS]
        done = subprocess.run(
            [sys.executable, str(WORKER)],
            input="".join(f"{path}\n" for path in some),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        words += [line for line in lines if "word" in line]
        begun = sum("begun" in line for line in lines)
        assert begun, f"the worker did not start: {done.stderr}"
        if "begun" in lines[-1]:
            words.append({"path": lines[-1]["begun"], "word": "died", "reason": f"exit {done.returncode}", "peak": 0})
        files = files[begun:]
    return words


def files_of(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in files if "\n" not in str(path))


@pytest.mark.corpora
def test_images_that_pillow_reads_are_read_with_its_pixels() -> None:
    if not CORPORA:
        pytest.skip("no folders named: make test-corpora CORPORA='DIR DIR'")
    wrong: list[str] = []
    print(f"\n{'corpus':20}", *(f"{name:>8}" for name in COLUMNS))
    for folder in CORPORA:
        verdicts = examined(files_of(folder))
        assert verdicts, f"{folder}: no files"
        count = Counter(str(line["word"]) for line in verdicts)
        read = sum(count[word] for word in ("same", "by name", "refused", "differs"))
        crashes = count["crashed"] + count["died"]
        peak = max(int(line["peak"]) for line in verdicts) >> 20
        words = (count[word] for word in ("same", "by name", "refused", "differs"))
        others = (crashes, count["neither"], count["ours alone"], peak)
        print(f"{folder.name:20}", *(f"{number:8}" for number in (len(verdicts), read, *words, *others)), flush=True)
        wrong += [f"{line['path']}: {line['word']}: {line['reason']}" for line in verdicts if line["word"] in WRONG]
    assert not wrong, "\n".join(wrong[:50])


def test_the_corpus_worker_detects_wrong_results(tmp_path: Path) -> None:
    """On files made in the test, so that it also runs without a corpus."""
    values = np.random.default_rng(1).integers(0, 65536, (20, 30), np.uint16)
    files = {
        "good.jpg": (encoded(picture(20, 30), "JPEG", 6), "same"),
        "deep.png": (encoded(Image.fromarray(values), "PNG"), "same"),
        "float.tif": (encoded(Image.fromarray(values.astype(np.float32)), "TIFF"), "by name"),
        "cut.png": (encoded(picture(20, 30), "PNG")[:500], "neither"),
        "other.ppm": (encoded(picture(20, 30), "PPM"), "not ours"),
        "text.txt": (b"no image", "neither"),
    }
    for name, (data, _) in files.items():
        (tmp_path / name).write_bytes(data)
    verdicts = {Path(str(line["path"])).name: line for line in examined(files_of(tmp_path))}
    assert {name: verdicts[name]["word"] for name in files} == {name: word for name, (_, word) in files.items()}
    assert all(0 < int(line["peak"]) < 2 << 30 for line in verdicts.values())
