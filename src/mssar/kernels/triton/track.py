"""Running statistics, moved after a forward pass.  C channels, J hidden channels.

track  the norms' tables → running means and variances, batches seen
"""

import triton
import triton.language as tl

from mssar.kernels.triton.common import gate_norm, hidden_norm


@triton.jit(do_not_specialize=["C", "CS", "J", "JS", "values"],
            do_not_specialize_on_alignment=["means", "variances", "seen"])  # fmt: skip
def track(
    norms,
    shares,
    means,  # running: of the front norm if there is one, the hidden layers', the gates'
    variances,
    seen,  # how many batches
    momenta,
    C,
    CS,
    J,
    JS,
    FRONT: tl.constexpr,  # how many of them there are: 0 or 1 …
    BRANCHES: tl.constexpr,  # … and 0 or L
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move running statistics towards a batch's, as BatchNorm2d does."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for k in tl.static_range(len(means)):
        if tl.program_id(0) == k:
            if k < FRONT:
                norm = norms
                width = C
                stride = CS
                share = tl.load(shares)
            elif k < FRONT + BRANCHES:
                norm = hidden_norm(norms, k - FRONT, CS, JS)
                width = J
                stride = JS
                share = tl.load(shares + 1 + (k - FRONT))
            else:
                norm = gate_norm(norms, k - FRONT - BRANCHES, CS, JS, L)
                width = C
                stride = CS
                share = tl.load(shares + 1 + (k - FRONT - BRANCHES))
            held = c < width
            mean = tl.load(norm + c, held, 0.0)
            variance = tl.load(norm + stride + c, held, 0.0)
            old = tl.load(means[k] + c, held, 0.0).to(tl.float32)
            old_variance = tl.load(variances[k] + c, held, 0.0).to(tl.float32)
            if tl.program_id(1) == 0:
                tl.store(seen[k], tl.load(seen[k]) + 1)
            tl.store(means[k] + c, old * (1 - momenta[k]) + mean * momenta[k], held)
            unbiased = variance / (1.0 - share)
            tl.store(
                variances[k] + c, old_variance * (1 - momenta[k]) + unbiased * momenta[k], held
            )
