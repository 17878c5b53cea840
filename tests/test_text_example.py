"""The examples with images of random text: labels are true, images are reproducible; JAX draws them and learns from
them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from suites.programs import run_python

import packer

EXAMPLES = Path(packer.__file__).resolve().parent.parent / "examples"
NO_JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")


@pytest.fixture(scope="module")
def text() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_text", EXAMPLES / "make_text.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_text"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(text: ModuleType, count: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(3)

    def random_bytes(shape: tuple[int, ...]) -> Any:
        return draw.integers(0, 256, shape, np.uint8)

    images, letters = text.text_images(random_bytes, count, text.LETTERS, text.glyphs(*text.CELL), text.GRID)
    return images, letters


@pytest.mark.parametrize("word", ["e", "he", "the"])
def test_labels_say_whether_a_line_has_the_word(text: ModuleType, word: str) -> None:
    letters = text.LETTERS[np.random.default_rng(5).integers(0, 256, (2000, *text.GRID))]
    lines = [["".join(text.ALPHABET[code] for code in line) for line in page] for page in letters]
    expected = [any(word in line for line in page) for page in lines]
    assert text.contains(letters, word).tolist() == expected
    assert 5 < sum(expected) < 2000, "one of the answers is missing"


def test_an_image_shows_its_letters(text: ModuleType) -> None:
    images, letters = drawn(text, 20)
    assert images.shape == (20, 224, 224, 3) and images.dtype == np.uint8
    height, width = text.CELL
    cells = images.reshape(20, text.GRID[0], height, text.GRID[1], width, 3).swapaxes(2, 3)
    spread = cells.astype(int).max((3, 4)) - cells.astype(int).min((3, 4))
    assert (spread[letters == 0] <= 16).all(), "a space has ink"
    assert (spread[letters != 0].max(-1) > 40).all(), "a letter has no ink"


def test_a_set_is_the_same_again_and_has_true_folders(text: ModuleType, tmp_path: Path) -> None:
    written = text.write_text(tmp_path / "a", 70, workers=2)
    assert text.write_text(tmp_path / "b", 70, workers=1) == written
    files = {path.relative_to(tmp_path / "a"): path.read_bytes() for path in (tmp_path / "a").rglob("*.jpg")}
    assert files == {path.relative_to(tmp_path / "b"): path.read_bytes() for path in (tmp_path / "b").rglob("*.jpg")}
    assert len(files) == len(set(files.values())) == 70 and {path.parent.name for path in files} == {"with", "without"}
    assert 14e3 < written / 70 < 18e3
    with pytest.raises(FileExistsError, match="name a new folder"):
        text.write_text(tmp_path / "a", 1)
    text.write_text(tmp_path / "c", 1, seed=1)
    assert next((tmp_path / "c").rglob("*.jpg")).read_bytes() not in files.values()


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "exists: name a new folder"), (["--word", "Ä"], "--word has 1 to 8 letters of")]
)
def test_bad_arguments_are_usage_errors(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = run_python(EXAMPLES / "make_text.py", tmp_path / "new" if arguments else tmp_path, *arguments)
    assert done.returncode == 2 and words in done.stderr


@NO_JAX
def test_the_example_learns(tmp_path: Path) -> None:
    done = run_python(EXAMPLES / "generate_jax.py", "--tiny")
    assert done.returncode == 0, done.stderr
    accuracy, guess = map(float, re.findall(r"([\d.]+)%", done.stdout.splitlines()[-1]))
    assert 45 < guess < 60 and accuracy > 90, done.stdout
    assert len(re.findall(r"[\d,]+ images/s", done.stdout)) == 2


@NO_JAX
def test_jax_draws_what_numpy_draws(tmp_path: Path, text: ModuleType) -> None:
    images, letters = drawn(text, 4)
    np.savez(tmp_path / "drawn.npz", images=images, letters=letters)
    code = f"""
import sys; sys.path.insert(0, {str(EXAMPLES)!r})
import jax, jax.numpy as jnp, numpy as np, make_text, generate_jax
draw = np.random.default_rng(3)
given = (jnp.asarray(make_text.LETTERS), jnp.asarray(make_text.glyphs(*make_text.CELL)), make_text.GRID)
images, letters = make_text.text_images(lambda shape: jnp.asarray(draw.integers(0, 256, shape, np.uint8)), 4, *given)
expected = np.load({str(tmp_path / "drawn.npz")!r})
assert np.array_equal(letters, expected["letters"]) and images.dtype == np.uint8
assert abs(np.asarray(images).astype(int) - expected["images"]).max() <= 1
images, labels = generate_jax.make_batch(generate_jax.TINY, jax.random.key(1), 500)
assert images.shape == (500, 36, 40, 3) and 0.4 < float(labels.mean()) < 0.6 and len(np.unique(images, axis=0)) == 500
print("same")
"""
    done = run_python("-c", code)
    assert done.returncode == 0 and done.stdout == "same\n", done.stderr
