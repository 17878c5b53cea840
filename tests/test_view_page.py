"""The page of `packer view`: its content and requests, and that names are never markup.

Most tests need Chromium (make test-pages requires it); the others run without it.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from suites.browser import Browser, Page, find_chromium, range_server
from view_cases import PAGE, colour_of, write_export

import packer
import readers
from packer.tools.report.charts import COLOURS
from packer.tools.view import view
from readers.order import Shuffled

ROOT = PAGE.parents[3]
SCRIPTS = {path.name: path.read_text("utf-8") for path in PAGE.glob("*.js")}
MANY = 1_000_000
HOSTILE = [
    "<img src=x onerror=alert(1)>", "\"'><script>alert(2)</script>", "\u202egpj.exe", "\x1b[2J\x00\n\t", "x" * 10_000,
    "javascript:alert(3)", "{{7*7}}${alert(4)}", "变換/データ", "&lt;b&gt;&amp;", "\ud800", "%00/../..",
]  # fmt: skip


# --- without a browser -----------------------------------------------------------------------------------------------
def test_the_page_has_nothing_inline_and_loads_nothing_from_elsewhere() -> None:
    html = (PAGE / "index.html").read_text("utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'" and rules["script-src"] == rules["style-src"] == "'self'"
    assert not {"unsafe-inline", "unsafe-eval", "*", "data:"} & set(re.findall(r"[\w*:-]+", policy[1]))
    assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style|<script(?! type=\"module\" src)", html)
    loaded = re.findall(r"<(?:script|link)[^>]*(?:src|href)=\"([^\"]*)\"", html)
    assert sorted(loaded) == sorted(["view.json", "icon.svg", "style.css", *SCRIPTS]), (
        "not each once, before it is requested"
    )
    for path in PAGE.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(", text), f"{path.name} names another site"


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_scripts_write_text_and_never_markup(name: str) -> None:
    wrong = r"(inner|outer|Adjacent)HTML|document\.write|\beval\(|new Function|setAttribute\(\"(?:style|on)|srcdoc"
    assert not re.search(wrong, SCRIPTS[name])
    for module in re.findall(r"from \"\./([^\"]+)\"", SCRIPTS[name]):
        assert module in SCRIPTS, f"{name} imports {module}, which does not exist"


def test_elements_that_scripts_use_are_in_the_page() -> None:
    html = (PAGE / "index.html").read_text("utf-8")
    used = {name for script in SCRIPTS.values() for name in re.findall(r"\bfind\(\"([\w-]+)\"\)", script)}
    assert used <= set(re.findall(r'\bid="([\w-]+)"', html)) and len(used) > 10


def test_every_file_of_the_page_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    data = project["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, listed in data.items() for pattern in listed]
    for path in PAGE.iterdir():
        assert any(fnmatch(str(path.relative_to(ROOT)), pattern) for pattern in patterns), f"no wheel would have {path}"


def test_the_page_has_the_colours_of_reports() -> None:
    named = re.compile(r"(--(?:surface|raised|ink|muted|grid|strong|series-\d)): (#\w+)")
    style = (PAGE / "style.css").read_text("utf-8")
    assert named.findall(style) == named.findall(COLOURS) and len(named.findall(style)) == 26


# --- in a browser ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    find_chromium()
    with range_server(write_export(tmp_path_factory.mktemp("million") / "page", MANY)) as url:
        yield url


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images of one colour each, with a rectangle that the mask, the box and the two points describe."""
    folder = tmp_path_factory.mktemp("drawn") / "shapes"
    fields = {"image": "image", "mask": "mask", "boxes": "boxes", "box_labels": "array", "points": "points",
              "caption": "text", "about": "json"}  # fmt: skip
    with packer.writer(folder, "hdf5", fields=fields, classes=["cat", "dog", "<b>fox</b>"]) as out:
        for number in range(24):
            image, mask = Image.new("RGB", (64, 48), colour_of(number)), Image.new("L", (64, 48))
            box = (16, 12, 48, 36)
            ImageDraw.Draw(mask).rectangle((16, 12, 47, 35), fill=2)
            out.write(
                f"shapes/{number:03d}", label=number % 3, image=np.asarray(image), mask=np.asarray(mask),
                boxes=np.float32([box]), box_labels=np.array([number % 3]), points=np.float32([[16, 12], [48, 36]]),
                caption=f"a rectangle <i>{number}</i>\nin colour", about={"number": number},
            )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def live(drawn: Path) -> Iterator[str]:
    find_chromium()
    with view(str(drawn)) as viewing:
        yield viewing.url


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Opens pages, which must not report errors."""
    pages: list[Page] = []

    def open_page(url: str, ready: str = SHOWN, **options: Any) -> Page:
        pages.append(browser.open(url, **options))
        pages[-1].wait(ready)
        return pages[-1]

    yield open_page
    complaints = [complaint for page in pages for complaint in page.complaints]
    for page in pages:
        page.close()
    assert not complaints


SHOWN = "$$('.cell img.shown').length > 5"
COLOUR = """(() => {{ const image = $('#cell-{0} img'), canvas = document.createElement('canvas');
    const context = canvas.getContext('2d'); context.drawImage(image, 0, 0, 4, 4);
    return [...context.getImageData(2, 2, 1, 1).data].slice(0, 3); }})()"""


def shown_sample(page: Page, position: int) -> int:
    """The sample whose colour the image at a position has, of the 64 colours."""
    page.wait(f"$('#cell-{position} img.shown')")
    colour = page.js(COLOUR.format(position))
    return int(np.argmin([np.abs(np.subtract(colour, colour_of(sample))).sum() for sample in range(64)]))


def key_at(page: Page, position: int) -> str:
    return str(page.wait(f"$('#cell-{position} .key')?.textContent"))


def test_a_million_samples_can_be_scrolled_to_the_end(opened: Any, million: str) -> None:
    page = opened(million)
    sizes = [size for _, size in page.transfers]
    assert [shown_sample(page, position) for position in (0, 1, 9)] == [0, 1, 9]
    assert sum(sizes) < 2_000_000 and max(sizes) < 1_000_000
    assert page.js("$$('.cell').length") < 200
    middle = "(() => { const grid = $('#grid'); grid.scrollTop = grid.scrollHeight / 2; })()"
    page.js(middle)
    page.wait("Math.abs($('.cell')?.dataset.position - 500000) < 2000")
    page.js("$('#grid').scrollTop = 1e9")
    assert key_at(page, MANY - 1) == f"{MANY - 1:09d}"
    assert shown_sample(page, MANY - 1) == (MANY - 1) % 64
    bottom = "$('{}').getBoundingClientRect().bottom"
    assert page.js(f"{bottom.format('#cell-999999')} <= {bottom.format('#grid')}"), "the last row is cut off"
    page.js("$('#grid').scrollBy(0, -500)")
    page.wait(f"(at => at < {MANY - 20} && at > {MANY - 200})($('.cell').dataset.position)")
    assert max(size for _, size in page.transfers) < 1_000_000 and sum(size for _, size in page.transfers) < 2_000_000


def test_classes_keys_and_numbers_are_found_among_a_million(opened: Any, million: str) -> None:
    page = opened(f"{million}#split=train&order=class&run=dog")
    page.wait("$('#status').textContent === 'dog: 333,333 of 1,000,000 samples'")
    assert [shown_sample(page, position) for position in (0, 1, 2)] == [1, 4, 7]
    page.key("c")
    page.type("fo")
    page.key("Enter")
    page.wait("location.hash.includes('run=fox')")
    assert shown_sample(page, 1) == 5 and key_at(page, 1) == "000000005"
    page.key("Escape", "h")
    page.click(".columns button:nth-child(2)")
    page.wait("$('#status').textContent === 'dog: 333,333 of 1,000,000 samples' && $$('.cell img.shown').length > 20")
    page.key("/")
    page.type("00073")
    page.key("Enter")
    assert key_at(page, 730_000) == "000730000", "not the first key with this beginning"
    assert page.js("$('#order').value") == "key"
    page.key("/")
    page.js("$('#find').select()")
    page.type("#123456")
    page.key("Enter")
    assert key_at(page, 123_456) == "000123456"
    assert max(size for _, size in page.transfers) < 1_000_000 and sum(size for _, size in page.transfers) < 2_000_000


@pytest.mark.parametrize("kind", ["live", "export"])
def test_a_part_of_a_key_is_found_and_the_selection_is_saved(opened: Any, live: str, drawn: Path, kind: str) -> None:
    if kind == "export":
        packer.export_view(drawn, drawn.parent / "page", overwrite=True)
    with nullcontext(live) if kind == "live" else range_server(drawn.parent) as url:
        page = opened(url if kind == "live" else f"{url}page/")
        assert page.js("$('#save').hidden"), "all samples are shown, so nothing is selected to save"
        page.key("/")
        page.type("pes/01")
        page.key("Enter")
        page.wait("$('#status').textContent === '10 of 24 samples'")
        page.js("""const real = URL.createObjectURL; URL.createObjectURL = blob => {
            if (!blob.type.startsWith('text')) return real(blob);
            globalThis.saved = blob.text(); return '#'; }""")
        page.click("#save")
        assert page.wait("globalThis.saved").splitlines() == [f"shapes/{number:03d}" for number in range(10, 20)]
        page.key("/")
        page.js("$('#find').select()")
        page.type("nothing of it")
        page.key("Enter")
        page.wait("$('#problem').textContent.includes('no key, class or text')")
        page.key("/", "Escape", "Escape")
        page.wait("$('#status').textContent === '24 samples'")
        page.click("#runs-list li:nth-child(3) button")
        page.wait("$('#status').textContent === 'dog: 8 of 24 samples'")
        page.key("x", "ArrowRight", "ArrowRight", "X")
        page.wait("$('#save').textContent === 'Save 3 keys' && $$('.cell.picked').length === 3")
        page.click("#save")
        assert page.wait("globalThis.saved").splitlines() == ["shapes/001", "shapes/004", "shapes/007"]
        page.key("x", "Escape")
        page.wait("$('#unpick').hidden && !$$('.cell.picked').length && $('#status').textContent.startsWith('dog')")


def test_hostile_names_are_text(opened: Any, tmp_path: Path) -> None:
    keys = sorted(HOSTILE, key=lambda key: key.encode("utf-8", "surrogatepass"))
    with range_server(write_export(tmp_path / "page", len(keys), keys=keys, classes=HOSTILE)) as url:
        page = opened(f"{url}#order=class")
        assert page.js("$$('.cell').length") == len(keys)
        page.wait("$$('#runs-list li').length > 9")
        page.click("#runs-list li:nth-child(3) button")
        page.wait("location.hash.match(/run|range/)")
        page.js("$('#runs-find').value = ''")
        for number in range(len(keys)):
            page.js(f"location.hash = '#order=stored&sample={number}'")
            page.wait(f"$('.panel h2')?.textContent && $('.facts dd').textContent.startsWith('{number} ')")
        page.click('[data-view="histograms"]')
        page.wait("$$('#histograms-view button').length > 9")
        assert not page.js("$$('main script, main b, main img[src=x]').length")
        text = page.js("document.body.textContent")
        assert not set("\x00\x1b\u202e") & set(text) and "<img src=x onerror=alert(1)>" in text
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        page.close()


SELECTED = "$('.cell[aria-selected=true]')"


def test_keys_walk_through_samples_and_back(opened: Any, live: str) -> None:
    page = opened(live)
    page.js("$('#skip').focus()")
    page.key("Enter")
    assert page.js("document.activeElement.id") == "grid", "the link at the top does not skip the tools"
    columns = int(page.js("$('#grid').getAttribute('aria-colcount')"))
    ends = {"Home": columns, "End": 2 * columns - 1, "ArrowUp": columns - 1, "ArrowLeft": columns - 2}
    for key, position in {"ArrowRight": 1, "ArrowDown": 1 + columns, **ends}.items():
        page.key(key)
        assert page.js(f"{SELECTED}.id") == f"cell-{position}", key
        assert page.js("$('#grid').getAttribute('aria-activedescendant')") == f"cell-{position}"
    page.key("End", control=True)
    assert page.js(f"{SELECTED}.id") == "cell-23"
    page.key("PageUp", "PageUp", "PageUp", "Home")
    assert page.js(f"{SELECTED}.id") == "cell-0"
    assert page.js(f"getComputedStyle({SELECTED}.firstChild).boxShadow.includes('rgb(0, 114, 178)')"), (
        "the focus is not visible"
    )
    page.key("ArrowRight", "Enter")
    page.wait("$('.panel h2').textContent === 'shapes/001' && document.activeElement.id === 'panel'")
    page.key("ArrowRight")
    page.wait("$('.panel h2').textContent === 'shapes/002'")
    assert "sample=2" in page.js("location.hash")
    page.key("Escape")
    assert page.js("document.activeElement.id") == "grid" and page.js(f"{SELECTED}.id") == "cell-2"
    page.key("?")
    assert page.js("$('#help').open && document.activeElement.closest('dialog') !== null")
    page.key("Escape")
    page.wait("!$('#help').open")
    page.key("h")
    page.wait("$('.columns button')")
    numbers = page.js("[...$('.columns').querySelectorAll('.number')].map(each => Number(each.textContent))")
    assert sum(numbers) == 24 and page.js("$('.said').textContent") == f"the largest bar: {max(numbers)} samples"
    page.js("$('.columns button[aria-disabled=false]').focus()")
    page.key("Enter")
    page.wait("!$('#samples-view').hidden && document.activeElement.id === 'grid' && location.hash.includes('order=')")
    page.key("Escape")
    page.wait("!location.hash.match(/run|range/)")


def test_masks_boxes_and_points_are_where_they_belong(opened: Any, live: str) -> None:
    page = opened(f"{live}#sample=4")
    page.wait("$('.top > .note').textContent === '5 of 24'")
    page.key("ArrowRight")
    page.wait("location.hash.includes('sample=5') && $$('.stage .layer').length === 3")
    mask = """(() => { const mask = $('canvas.mask');
        const { data } = mask.getContext('2d').getImageData(0, 0, 64, 48);
        return [mask.width, mask.height, [...data].filter((_, i) => i % 4 === 3)]; })()"""
    width, height, alpha = page.js(mask)
    expected = np.zeros((48, 64), int)
    expected[12:36, 16:48] = 255
    assert (width, height) == (64, 48) and np.array_equal(np.reshape(alpha, (48, 64)), expected)
    for zoom in ("1", "+", "0"):
        page.js("$('.panel').focus()")
        page.key(zoom)
        rect = """(() => { const image = $('.stage .picture').getBoundingClientRect();
            const box = $('.boxes rect').getBoundingClientRect(), scale = image.width / 64;
            return [box.left - image.left, box.top - image.top, box.right - image.left, box.bottom - image.top]
                .map(value => value / scale); })()"""
        assert page.js(rect) == pytest.approx([16, 12, 48, 36], abs=0.6), f"after {zoom}"
    assert page.js("$$('.points path').map(path => path.getAttribute('d'))") == ["M16 12h0", "M48 36h0"]
    page.wait("$('.json')")
    text = page.js("$('.panel').textContent")
    for words in ("6 of 24", "a rectangle <i>5</i>\nin colour", '"number": 5', "<b>fox</b>", "✓ as stored", "64 × 48"):
        assert words in text, words
    assert page.js("$('.tag').textContent") == "<b>fox</b>", "a box label lacks the name of its class"
    assert re.search(r"0 \d\d %2 25 %", page.js("$('.legend').textContent"))
    page.key("o")
    page.wait("$$('.layer').every(layer => !layer.getClientRects().length)")
    page.click(".panel details summary")
    page.wait("$('.hex').textContent.startsWith('0000  89 50 4e 47')")


def test_where_selects_samples_and_reports_errors(opened: Any, live: str) -> None:
    page = opened(live)
    page.js("$('#where').focus()")
    page.type('label == "dog" and matches(key, "*1?")')
    page.key("Enter")
    page.wait("$('#status').textContent === '4 of 24 samples'")
    assert [shown_sample(page, position) for position in range(4)] == [10, 13, 16, 19]
    page.js("$('#where').focus(); $('#where').value = 'nonsense >'")
    page.key("Enter")
    page.wait("!$('#problem').hidden && $('#problem').textContent.length > 10")
    assert page.js("$('#status').textContent") == "4 of 24 samples", "the shown samples have changed"
    assert any("400" in complaint for complaint in page.complaints), "the browser does not log the status of the answer"
    page.forgive()
    page.click("#runs-list li:nth-child(2) button")
    page.wait(
        "$('#status').textContent === 'dog: 4 of 4 samples' || $('#status').textContent === 'dog: 4 of 24 samples'"
    )
    page.js("$('#runs-by').value = 'media'; $('#runs-by').dispatchEvent(new Event('change'))")
    page.wait("$$('#runs-list li').map(e => e.textContent).join(' ') === 'All4 png4'")


def test_predictions_are_beside_the_labels_and_pictures_have_sizes(opened: Any, drawn: Path, tmp_path: Path) -> None:
    (tmp_path / "model.csv").write_text(
        "key,predicted,score\nshapes/001,cat,0.5\nshapes/002,cat,0.75\nshapes/003,cat,1\n"
    )
    packer.export_view(drawn, drawn.parent / "page", overwrite=True, predictions=tmp_path / "model.csv")
    with view(drawn, predictions=tmp_path / "model.csv") as viewing, range_server(drawn.parent) as url:
        for address in (viewing.url, f"{url}page/"):
            page = opened(f"{address}#order=mistakes&run=wrong", "$$('.cell img.shown').length === 2")
            texts = page.js("$$('.cell .labels').map(e => [...e.children].map(one => one.textContent))")
            assert texts == [["<b>fox</b>", "cat 0.75"], ["dog", "cat 0.50"]]
            page.click("#cell-0")
            page.wait("$('.facts .bad')?.textContent === 'cat 0.75'")
            page.key("Escape")
            tile = "$('#cell-0').getBoundingClientRect().width"
            width = page.js(tile)
            page.key("+")
            page.wait(f"{tile} > 1.3 * {width} && location.hash.includes('size=2')")


def test_a_batch_is_shown_as_in_training(opened: Any, live: str, drawn: Path) -> None:
    batch = "#view=batches&seed=3&epoch=1&batch_size=8&ranks=2&rank=1"
    page = opened(f"{live}{batch}", "$$('.batch img.shown').length === 8")
    for width in (1500, 1400, 1280):
        page.resize(width, 800)
        heights = page.js("$$('.batches .field').map(field => field.getBoundingClientRect().height)")
        assert len(heights) == 8 and max(heights) < 40, "labels of the tools wrap"
    assert page.js("$('[name=ops]').value.includes('RandomResizedCrop')"), "not the usual augmentations"
    page.js("$('[name=ops]').value = 'CenterCrop:24'; $('[name=batch]').focus()")
    page.key("Enter")
    page.wait("$$('.batch img.shown').length === 8 && $('.draws').textContent.includes('CenterCrop')")
    assert "op=CenterCrop" in page.js("location.hash"), "the address does not contain the batch"
    with readers.open(drawn) as reader:
        samples = Shuffled(len(reader), seed=3).indices(1, np.arange(8, 16))
        expected = [reader[int(sample)].key for sample in samples]
    assert page.js("$$('.batch .key').map(key => key.textContent)") == expected, "rank 1: not the second half of a step"
    assert page.js("$('.batch img').naturalWidth") == 24
    assert "Batch 0 of epoch 1 (batches 0 to 0): 8 samples" in page.js("$('.batches .status').textContent")
    page.click(".batch .open")
    page.wait(f"$('.panel h2')?.textContent === {json.dumps(expected[0])} && $('.crop rect')")
    crop = "['x', 'y', 'width', 'height'].map(name => $('.crop rect').getAttribute(name))"
    assert page.js(crop) == ["20", "12", "24", "24"], "the crop is not marked in the image"
    page.js("location.hash = '#view=batches&batch=9&batch_order=shuffled'")
    page.wait("$('.batches .status.problem')?.textContent.includes('batch')")
    page.forgive()


def test_an_export_shows_the_same_behind_any_web_server(opened: Any, drawn: Path) -> None:
    export = packer.export_view(drawn, drawn.parent / "page", overwrite=True)
    with range_server(export.serve) as url:
        page = opened(f"{url}{export.page}#split=train&order=class&run=dog")
        assert [shown_sample(page, position) for position in range(8)] == list(range(1, 24, 3))
        fetched = " ".join(url for url, _ in page.transfers)
        assert "/thumbnails/train.npy" in fetched and "/train-0" not in fetched, "an image itself was fetched"
        page.click("#cell-2")
        page.wait("$('.panel h2')?.textContent === 'shapes/007' && $$('.stage .layer').length === 3 && $('.json')")
        page.wait("$('.panel .good')")
        text = page.js("$('.panel').textContent")
        for words in (
            "3 of 8",
            "a rectangle <i>7</i>",
            '"number": 7',
            "✓ as stored",
            "64 × 48",
            "train-00000-of-00001",
        ):
            assert words in text, words
        assert page.js("$('#where-form').hidden && $('#batches-tab').hidden"), "a function that needs Python is offered"
        page.click(".panel a.download")
        page.wait("$('.panel a.download').href.startsWith('blob:')")
        page.key("Escape", "h")
        page.click("#histograms-view .columns button[aria-disabled=false]")
        page.wait("location.hash.includes('order=') && !$('#samples-view').hidden")
        page.close()
    assert max(size for _, size in page.transfers) < 1_000_000


def test_a_server_without_ranges_is_named_as_the_reason(opened: Any, tmp_path: Path) -> None:
    folder = write_export(tmp_path / "page", 9)
    with (folder / "shard.bin").open("ab") as file:
        file.truncate(20_000_000)
    with range_server(folder, answers_ranges=False) as url:
        page = opened(url, "$$('.cell .none').length === 9")
        page.click("#cell-0")
        page.wait("$('.panel')?.textContent.includes('does not answer Range requests')")
        assert key_at(page, 8) == "000000008", "small files are not read as a whole"
        page.close()


def test_damaged_samples_are_found_with_the_reason(opened: Any, drawn: Path, tmp_path: Path) -> None:
    shutil.copytree(drawn, tmp_path / "set")
    with readers.open(drawn) as reader:
        extents = reader.table.extents([7], "image")
    with (tmp_path / "set" / "train-00000-of-00001.h5").open("r+b") as shard:
        shard.seek(int(extents.offset[0]) + 1)
        shard.write(b"\0\0\0")
    with view(tmp_path / "set") as viewing:
        page = opened(f"{viewing.url}#order=damaged", "$('#cell-0 .none')")
        assert page.js("$('#status').textContent") == "1 of 24 samples"
        page.click("#cell-0")
        page.wait("$('.panel h2')?.textContent === 'shapes/007' && $('.panel .problem') && $('.panel .bad')")
        page.close()
        page.forgive()  # thumbnails that the server could not make


WRAPPED = """$$('button, label, summary, figcaption, .count, h3').flatMap(e => [...e.childNodes]).filter(node => {
    const lines = document.createRange();
    lines.selectNodeContents(node);
    return node.nodeType === Node.TEXT_NODE && node.data.trim() && lines.getClientRects().length > 1;
}).map(node => node.data)"""


@pytest.mark.parametrize(
    ("width", "height", "dark"), [(320, 256, False), (420, 800, True)], ids=["400 % zoom", "phone, dark"]
)
def test_narrow_windows_show_all_content(opened: Any, live: str, width: int, height: int, dark: bool) -> None:
    shown = "$('.cell img.shown')"
    views = {"": shown, "#sample=3": "$$('.stage .layer').length === 3", "#view=histograms": "$('.columns')",
             "#order=class&run=dog": f"$('#status').textContent.startsWith('dog') && {shown}"}  # fmt: skip
    page = opened(live, views[""], width=width, height=height, dark=dark)
    for fragment, ready in views.items():
        page.js(f"location.hash = {json.dumps(fragment)}")
        page.wait(ready)
        assert page.js("document.documentElement.scrollWidth <= innerWidth"), f"{fragment} is wider than the window"
        outside = """$$('button, input, select, h1, h2, h3, p, dd, a, summary')
            .filter(e => {
            const b = e.getBoundingClientRect();
            return b.width && b.right > innerWidth + 1 && !e.closest('.stage, pre, .skip'); }).map(e => e.outerHTML)"""
        assert page.js(outside) == [], fragment
        if width > 400:
            for wide in (390, 600, 900, 1280, 2560):
                page.resize(wide, height)
                page.js("new Promise(resolve => setTimeout(resolve, 50))")
                assert page.js(WRAPPED) == [], f"{fragment} at {wide}"
            page.resize(width, height)
    page.js("$('#save').hidden = false; $('#save').style.whiteSpace = 'normal'; $('#save').style.width = '3rem'")
    assert len(page.js(WRAPPED)) == 1, "wrapped labels were not detected"
    surface = page.js("getComputedStyle(document.documentElement).backgroundColor")
    assert surface == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
