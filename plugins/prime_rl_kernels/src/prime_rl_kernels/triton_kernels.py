"""Triton kernels of a GPU: RMS norm, rotary embedding, SwiGLU, and passes over logits.

Each reads its inputs once, computes in float32 and rounds what it writes. ``gpu_ops.py`` launches
them; this file alone imports triton.

Shapes: N = rows, D = size of a row, H = heads, T = tokens, W = logits of a row in a block, L =
labels of a token, P = programs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# An annotation would be a global variable, which Triton's compiler refuses.

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    weight,
    y,
    scale,
    num_rows,
    size,
    eps,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """y [N, D] and scale r [N] of x [N, D]. The normalized row is rounded to the dtype of ``x``
    before it meets the weight, as in transformers and vLLM."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, SIZE)
    is_row = rows < num_rows
    is_column = columns < size
    inside = is_row[:, None] & is_column[None, :]
    places = rows[:, None] * size + columns[None, :]

    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / size + eps)
    tl.store(scale + rows, r, mask=is_row)

    normalized = (values * r[:, None]).to(x.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + places, (normalized * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    grad,
    x,
    weight,
    scale,
    of_x,
    of_weight,
    num_rows,
    size,
    num_tiles,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """of_x [N, D], and of_weight [P, D]: each program's sum over its ``num_tiles`` times ``ROWS``
    rows."""
    program = tl.program_id(0)
    columns = tl.arange(0, SIZE)
    is_column = columns < size
    w = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    total = tl.zeros((SIZE,), dtype=tl.float32)

    for tile in range(num_tiles):
        rows = (program.to(tl.int64) * num_tiles + tile) * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_rows
        inside = is_row[:, None] & is_column[None, :]
        places = rows[:, None] * size + columns[None, :]
        g = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(scale + rows, mask=is_row, other=0.0)

        normalized = (values * r[:, None]).to(x.dtype.element_ty).to(tl.float32)
        total += tl.sum(g * normalized, axis=0)

        slopes = g * w[None, :]
        curve = tl.sum(slopes * values, axis=1) * r * r * r / size
        result = slopes * r[:, None] - values * curve[:, None]
        tl.store(of_x + places, result.to(of_x.dtype.element_ty), mask=inside)

    tl.store(of_weight + program.to(tl.int64) * size + columns, total, mask=is_column)


@triton.jit
def rotate(
    x,
    cos,
    sin,
    y,
    num_tokens,
    num_heads,
    half,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    cos_batch,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token of x [B, H, T, D], with strides ``x_...``; cos, sin: [B or 1, T, D]."""
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    is_column = columns < half
    inside = (heads < num_heads)[:, None] & is_column[None, :]

    angle = batch * cos_batch + token * 2 * half + columns
    cos1 = tl.load(cos + angle, mask=is_column, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + angle + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + angle, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + angle + half, mask=is_column, other=0.0).to(tl.float32)[None, :]

    source = batch * x_batch + token * x_token + heads[:, None] * x_head + columns[None, :]
    x1 = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + source + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:  # the transposed rotation
        y1 = x1 * cos1 + x2 * sin2
        y2 = x2 * cos2 - x1 * sin1
    else:
        y1 = x1 * cos1 - x2 * sin1
        y2 = x2 * cos2 + x1 * sin2

    target = batch * y_batch + token * y_token + heads[:, None] * y_head + columns[None, :]
    tl.store(y + target, y1.to(y.dtype.element_ty), mask=inside)
    tl.store(y + target + half, y2.to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu(gate, up, y, size, BLOCK: tl.constexpr):
    """y = silu(gate) up, of ``size`` numbers. silu is rounded before the product, as in
    transformers."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    shrunk = tl.exp(-tl.abs(g))  # overflows for no g
    s = tl.where(g >= 0, 1.0, shrunk) / (1.0 + shrunk)
    silu = (g * s).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(y + places, (silu * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(grad, gate, up, of_gate, of_up, size, BLOCK: tl.constexpr):
    """With s = sigmoid(gate): of_gate = grad up s (1 + gate (1 - s)); of_up = grad gate s."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    slope = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    shrunk = tl.exp(-tl.abs(g))
    s = tl.where(g >= 0, 1.0, shrunk) / (1.0 + shrunk)
    by_gate = slope * u * s * (1.0 + g * (1.0 - s))
    by_up = slope * g * s
    tl.store(of_gate + places, by_gate.to(of_gate.dtype.element_ty), mask=inside)
    tl.store(of_up + places, by_up.to(of_up.dtype.element_ty), mask=inside)


@triton.jit
def fold_logits(
    logits,
    temperatures,
    labels,
    peak,
    total,
    moment,
    chosen,
    weights,
    first,
    width,
    num_labels,
    HAS_TEMPERATURES: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold one row of a block of logits, the words from ``first`` on, into the row's running sums
    (``fused_head.py`` has the formulas). ``WRITES``: also exp(z - m'), into ``weights`` [N, W]."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * width
    columns = tl.arange(0, BLOCK)
    divisor = 1.0
    if HAS_TEMPERATURES:
        divisor = tl.load(temperatures + row)

    highest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for offset in range(0, width, BLOCK):
        inside = offset + columns < width
        z = tl.load(logits + begin + offset + columns, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, z)

    # Temperatures are positive, so the largest quotient is that of the largest logit.
    before = tl.load(peak + row)
    higher = tl.maximum(before, tl.max(highest, axis=0) / divisor)

    # The second reading comes from the cache: a program has one row.
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    moments = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, width, BLOCK):
        inside = offset + columns < width
        z = tl.load(logits + begin + offset + columns, mask=inside, other=0.0)
        shifted = z / divisor - higher
        weight = tl.where(inside, tl.exp(shifted), 0.0)
        sums += weight
        moments += weight * shifted
        if WRITES:
            target = weights + begin + offset + columns
            tl.store(target, weight.to(weights.dtype.element_ty), mask=inside)

    old_total = tl.load(total + row)
    old_moment = tl.load(moment + row)
    shrink = tl.exp(before - higher)
    new_moment = shrink * (old_moment + (before - higher) * old_total)
    tl.store(moment + row, new_moment + tl.sum(moments, axis=0))
    tl.store(total + row, shrink * old_total + tl.sum(sums, axis=0))
    tl.store(peak + row, higher)

    for number in range(num_labels):
        place = tl.load(labels + row * num_labels + number) - first
        is_here = (place >= 0) & (place < width)
        z = tl.load(logits + begin + place, mask=is_here, other=0.0)
        tl.store(chosen + row * num_labels + number, z / divisor, mask=is_here)


@triton.jit
def logit_gradients(
    logits,
    temperatures,
    labels,
    log_normalizers,
    grad,
    entropies,
    entropy_grad,
    of_logits,
    first,
    width,
    num_labels,
    HAS_TEMPERATURES: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of one row of a block of logits (``fused_head.py`` has the formulas)."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * width
    columns = tl.arange(0, BLOCK)
    divisor = 1.0
    if HAS_TEMPERATURES:
        divisor = tl.load(temperatures + row)

    log_normalizer = tl.load(log_normalizers + row)
    share = 0.0
    for number in range(num_labels):
        share += tl.load(grad + row * num_labels + number) / divisor

    for offset in range(0, width, BLOCK):
        inside = offset + columns < width
        z = tl.load(logits + begin + offset + columns, mask=inside, other=0.0)
        log_softmax = z / divisor - log_normalizer
        factor = tl.zeros((BLOCK,), dtype=tl.float32) - share
        if HAS_ENTROPIES:
            slope = -tl.load(entropy_grad + row) / divisor
            factor += (log_softmax + tl.load(entropies + row)) * slope

        result = tl.exp(log_softmax) * factor
        for number in range(num_labels):
            place = tl.load(labels + row * num_labels + number) - first
            of_label = tl.load(grad + row * num_labels + number) / divisor
            result += tl.where(offset + columns == place, of_label, 0.0)

        target = of_logits + begin + offset + columns
        tl.store(target, result.to(of_logits.dtype.element_ty), mask=inside)
