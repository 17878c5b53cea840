"""The Triton kernels: render boxes of decoded images of any size to one batch in one launch, and move images.

A program renders one tile of one image. Antialiased bilinear resizing is separable, and each pass is a product with a
banded matrix. So a program loops over the pixels under its tile in blocks of ROWS x COLUMNS, and multiplies twice:

    block [ROWS, COLUMNS] @ weights [COLUMNS, TILE_X]  ->  rounded to 0..255, as torch does between passes
    weights [TILE_Y, ROWS] @ result [ROWS, TILE_X]     ->  rounded to 0..255, flipped, normalised, stored

The weights, `max(0, 1 - distance / support)` as in torch's antialiased `interpolate`, are computed in the loop, and the
results are divided by their sums. A tile reads every pixel once, with a border as wide as the filter. Products are
float16 with float32 sums: pixels are exact in float16, weights have an error of at most 2^-12.

A row of the table, int64: address of the upper left red value of the box; steps in bytes to the next row, column and
channel of the upright image; height and width of the box; height and width of the resized box; top and left of the crop
of the resized box, which is black beyond its edges; 1 to mirror left and right; 1 to mirror top and bottom. A box spans
less than 2^31 bytes.

Needs triton: `pip install 'packer-vision[triton]'`; with TRITON_INTERPRET=1 it runs without a GPU.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise MissingExtraError("triton", "triton", "the fused augmentation") from error

TABLE_COLUMNS = 12
_COLUMNS = tl.constexpr(TABLE_COLUMNS)


@triton.jit
def _weights(pixels, centres, inverse, inside):
    """float16 weights of source pixels, by their distance from the centre of the result pixel."""
    distance = tl.abs(pixels.to(tl.float32) + 0.5 - centres)
    weights = tl.maximum(1.0 - distance * inverse, 0.0)
    return tl.where(inside, weights, 0.0).to(tl.float16)


@triton.jit
def _centres(tile, crop, flip, length, resized, scale, TILE: tl.constexpr):
    """The centres of the pixels of a tile in box coordinates, on one axis, clamped to the box: float32 [TILE]."""
    at = tl.minimum(tile * TILE + tl.arange(0, TILE), length - 1)
    at = tl.where(flip != 0, length - 1 - at, at) + crop
    at = tl.minimum(tl.maximum(at, 0), resized - 1)
    return (at.to(tl.float32) + 0.5) * scale


@triton.jit
def _inside(tile, crop, flip, length, resized, TILE: tl.constexpr):
    """Which pixels of a tile are in the resized box, on one axis: bool [TILE]. The crop may extend beyond it."""
    at = tile * TILE + tl.arange(0, TILE)
    at = tl.where(flip != 0, length - 1 - at, at) + crop
    return (at >= 0) & (at < resized)


@triton.jit
def _store(out, values, inside, factors, channel: tl.constexpr, mask, FLOAT: tl.constexpr):
    """Store values rounded to 0..255, black outside the box; normalised in a batch of floats."""
    values = tl.minimum(tl.maximum(tl.floor(values + 0.5), 0.0), 255.0)
    values = tl.where(inside, values, 0.0)
    if FLOAT:
        values = values * tl.load(factors + channel) + tl.load(factors + 3 + channel)
    tl.store(out, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def render_tiles(
    table,
    out,
    factors,
    out_height,
    out_width,
    image_step,
    channel_step,
    row_step,
    column_step,
    FLOAT: tl.constexpr,
    TILE_Y: tl.constexpr,
    TILE_X: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Render the boxes of a table, described in the module.

    out: images of out_height x out_width, with steps in values. factors: float32 [6], a factor for each channel, then a
    summand for each. Grid: images x tiles of TILE_Y x TILE_X.
    """
    tiles_x = tl.cdiv(out_width, TILE_X)
    tiles = tl.cdiv(out_height, TILE_Y) * tiles_x
    image = tl.program_id(0) // tiles
    tile_y = tl.program_id(0) % tiles // tiles_x
    tile_x = tl.program_id(0) % tiles % tiles_x

    entry = table + image.to(tl.int64) * _COLUMNS
    pixels = tl.load(entry).to(tl.pointer_type(tl.uint8))
    step_y, step_x = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    step_c = tl.load(entry + 3)
    height, width = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    resized_y, resized_x = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)
    scale_y = height.to(tl.float32) / resized_y.to(tl.float32)
    scale_x = width.to(tl.float32) / resized_x.to(tl.float32)
    support_y, support_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    inverse_y, inverse_x = 1.0 / support_y, 1.0 / support_x
    crop_y, crop_x = tl.load(entry + 8).to(tl.int32), tl.load(entry + 9).to(tl.int32)
    flip_x, flip_y = tl.load(entry + 10).to(tl.int32), tl.load(entry + 11).to(tl.int32)

    centres_y = _centres(tile_y, crop_y, flip_y, out_height, resized_y, scale_y, TILE_Y)
    centres_x = _centres(tile_x, crop_x, flip_x, out_width, resized_x, scale_x, TILE_X)
    first_y = tl.maximum(tl.floor(tl.min(centres_y, 0) - support_y), 0.0).to(tl.int32)
    first_x = tl.maximum(tl.floor(tl.min(centres_x, 0) - support_x), 0.0).to(tl.int32)
    last_y = tl.minimum(tl.ceil(tl.max(centres_y, 0) + support_y).to(tl.int32), height)
    last_x = tl.minimum(tl.ceil(tl.max(centres_x, 0) + support_x).to(tl.int32), width)

    red = tl.zeros([TILE_Y, TILE_X], tl.float32)
    green = tl.zeros([TILE_Y, TILE_X], tl.float32)
    blue = tl.zeros([TILE_Y, TILE_X], tl.float32)
    sum_y = tl.zeros([TILE_Y], tl.float32)
    for y in range(first_y, last_y, ROWS):
        rows = y + tl.arange(0, ROWS)
        weights_y = _weights(rows[None, :], centres_y[:, None], inverse_y, (rows < height)[None, :])
        sum_y += tl.sum(weights_y.to(tl.float32), 1)
        red_rows = tl.zeros([ROWS, TILE_X], tl.float32)
        green_rows = tl.zeros([ROWS, TILE_X], tl.float32)
        blue_rows = tl.zeros([ROWS, TILE_X], tl.float32)
        sum_x = tl.zeros([TILE_X], tl.float32)
        for x in range(first_x, last_x, COLUMNS):
            columns = x + tl.arange(0, COLUMNS)
            weights_x = _weights(columns[:, None], centres_x[None, :], inverse_x, (columns < width)[:, None])
            sum_x += tl.sum(weights_x.to(tl.float32), 0)
            at = rows[:, None] * step_y + columns[None, :] * step_x
            inside = (rows < last_y)[:, None] & (columns < last_x)[None, :]
            block = tl.load(pixels + at, mask=inside, other=0).to(tl.float16)
            red_rows = tl.dot(block, weights_x, red_rows)
            block = tl.load(pixels + step_c + at, mask=inside, other=0).to(tl.float16)
            green_rows = tl.dot(block, weights_x, green_rows)
            block = tl.load(pixels + 2 * step_c + at, mask=inside, other=0).to(tl.float16)
            blue_rows = tl.dot(block, weights_x, blue_rows)
        per_x = (1.0 / sum_x)[None, :]
        red = tl.dot(weights_y, tl.floor(red_rows * per_x + 0.5).to(tl.float16), red)
        green = tl.dot(weights_y, tl.floor(green_rows * per_x + 0.5).to(tl.float16), green)
        blue = tl.dot(weights_y, tl.floor(blue_rows * per_x + 0.5).to(tl.float16), blue)

    per_y = (1.0 / sum_y)[:, None]
    y_out, x_out = tile_y * TILE_Y + tl.arange(0, TILE_Y), tile_x * TILE_X + tl.arange(0, TILE_X)
    mask = (y_out < out_height)[:, None] & (x_out < out_width)[None, :]
    inside_y = _inside(tile_y, crop_y, flip_y, out_height, resized_y, TILE_Y)
    inside_x = _inside(tile_x, crop_x, flip_x, out_width, resized_x, TILE_X)
    inside = inside_y[:, None] & inside_x[None, :]
    out += image.to(tl.int64) * image_step + y_out[:, None] * row_step + x_out[None, :] * column_step
    _store(out, red * per_y, inside, factors, 0, mask, FLOAT)
    _store(out + channel_step, green * per_y, inside, factors, 1, mask, FLOAT)
    _store(out + 2 * channel_step, blue * per_y, inside, factors, 2, mask, FLOAT)


MOVE_COLUMNS = 16
_MOVE_COLUMNS = tl.constexpr(MOVE_COLUMNS)


@triton.jit
def _tap(pixels, x, y, width, height, step_x, step_y, flip_x, flip_y, mask):
    """The values of a flipped image at columns x and rows y; 0 outside the image."""
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & mask
    x = tl.where(flip_x != 0, width - 1 - x, x)
    y = tl.where(flip_y != 0, height - 1 - y, y)
    return tl.load(pixels + y * step_y + x * step_x, mask=inside, other=0).to(tl.float32)


@triton.jit
def move_tiles(table, maps, tiles, TILE_Y: tl.constexpr, TILE_X: tl.constexpr):
    """Move images by affine maps (`readers.augment.ops.base.map_of_halves`) to results uint8 [3, height, width].

    A row of the table, int64: address, steps and size of the source, as for `render_tiles`; the address of the result;
    (rows, columns, top, left, height, width) of `map_of_halves`; 1 to mirror the source left and right; 1 to mirror it
    top and bottom; 1 for nearest sampling. maps: float32 [n, 6]. tiles: tiles of the largest result. Grid: images x
    tiles.
    """
    image, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    entry = table + image.to(tl.int64) * _MOVE_COLUMNS
    pixels, out = tl.load(entry).to(tl.pointer_type(tl.uint8)), tl.load(entry + 6).to(tl.pointer_type(tl.uint8))
    step_y, step_x = tl.load(entry + 1).to(tl.int32), tl.load(entry + 2).to(tl.int32)
    step_c = tl.load(entry + 3)
    height, width = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    rows, columns = tl.load(entry + 7).to(tl.int32), tl.load(entry + 8).to(tl.int32)
    top, left = tl.load(entry + 9).to(tl.int32), tl.load(entry + 10).to(tl.int32)
    out_height, out_width = tl.load(entry + 11).to(tl.int32), tl.load(entry + 12).to(tl.int32)
    flip_x, flip_y = tl.load(entry + 13).to(tl.int32), tl.load(entry + 14).to(tl.int32)
    is_nearest = tl.load(entry + 15).to(tl.int32)

    tiles_x = tl.cdiv(out_width, TILE_X)
    y_out = (tile // tiles_x) * TILE_Y + tl.arange(0, TILE_Y)
    x_out = (tile % tiles_x) * TILE_X + tl.arange(0, TILE_X)
    mask = (y_out < out_height)[:, None] & (x_out < out_width)[None, :]
    down = ((2 * (top + y_out) + 1 - rows).to(tl.float32) / rows.to(tl.float32))[:, None]
    across = ((2 * (left + x_out) + 1 - columns).to(tl.float32) / columns.to(tl.float32))[None, :]
    by = maps + image * 6
    x = tl.load(by) * across + (tl.load(by + 1) * down + tl.load(by + 2))
    y = tl.load(by + 3) * across + (tl.load(by + 4) * down + tl.load(by + 5))
    x = (x + 1.0) * (width.to(tl.float32) * 0.5) - 0.5
    y = (y + 1.0) * (height.to(tl.float32) * 0.5) - 0.5
    # Clamp to just outside the image, so that the numbers fit into int32.
    x = tl.minimum(tl.maximum(x, -2.0), width.to(tl.float32))
    y = tl.minimum(tl.maximum(y, -2.0), height.to(tl.float32))
    x = tl.where(is_nearest != 0, tl.floor(x + 0.5), x)
    y = tl.where(is_nearest != 0, tl.floor(y + 0.5), y)
    share_x, share_y = x - tl.floor(x), y - tl.floor(y)
    x_in, y_in = tl.floor(x).to(tl.int32), tl.floor(y).to(tl.int32)
    out += y_out[:, None] * out_width + x_out[None, :]
    for _ in tl.static_range(3):
        values = tl.zeros([TILE_Y, TILE_X], tl.float32)
        for corner in tl.static_range(4):
            by_x = share_x if corner % 2 else 1.0 - share_x
            by_y = share_y if corner // 2 else 1.0 - share_y
            at_x, at_y = x_in + corner % 2, y_in + corner // 2
            values += by_x * by_y * _tap(pixels, at_x, at_y, width, height, step_x, step_y, flip_x, flip_y, mask)
        tl.store(out, tl.floor(values + 0.5).to(tl.uint8), mask=mask)
        pixels += step_c
        out += out_height * out_width
