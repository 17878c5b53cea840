"""Coefficients finished on a GPU: the bytes of a batch cross the bus, and boxes of RGB are made of them there.

    images, their shapes  ──►  upload, one copy  ──►  decode_rows  ──►  samples  ──►  make_pixels  ──►  pictures

`decoder` is the host's part. The kernels are Triton's: `rows` finds the coefficients of a row of blocks, `transforms`
has the inverse DCTs, `pixels` upsampling and colours. There are two, with the samples of all boxes in the device's
memory between them: a pixel needs the chroma of its neighbours, whose blocks one kernel for both would have to
transform once for each tile that touches them. Everything after RGB is what every other picture goes through.
"""

__all__: list[str] = []
