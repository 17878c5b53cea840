"""Decoding of coefficients on a GPU: the stored bytes of a batch are copied there and decoded to boxes of RGB pixels.

    images, their shapes  ──►  upload, one copy  ──►  decode_rows  ──►  samples  ──►  make_pixels  ──►  pictures

`decoder` is the part on the host. The two kernels are written in Triton: one decodes the rows of blocks to samples,
with the inverse DCTs, the other upsamples chroma and converts colours. The samples of all boxes are in device memory
between the two. A single kernel would be slower: a pixel needs the chroma of its neighbours, so each tile would
transform the blocks at its border again. After that, the pictures are processed as any other decoded image.
"""

__all__: list[str] = []
