"""BN's running statistics, of all norms of a block at once."""

import triton
import triton.language as tl


@triton.jit
def track(
    means,
    variances,  # biased
    running_means,
    running_variances,
    counts,
    momenta,
    values,  # of a channel, in a batch
    widths,
    BLOCK: tl.constexpr,
):
    for norm in tl.static_range(len(means)):
        if tl.program_id(0) == norm:
            tl.store(counts[norm], tl.load(counts[norm]) + 1)
            unbiased = values[norm] / (values[norm] - 1.0)
            for start in range(0, widths[norm], BLOCK):
                c = start + tl.arange(0, BLOCK)
                held = c < widths[norm]
                old = tl.load(running_means[norm] + c, held, 0.0).to(tl.float32)
                new = tl.load(means[norm] + c, held, 0.0)
                new = old * (1 - momenta[norm]) + new * momenta[norm]
                tl.store(running_means[norm] + c, new, held)
                old = tl.load(running_variances[norm] + c, held, 0.0).to(tl.float32)
                new = tl.load(variances[norm] + c, held, 0.0) * unbiased
                new = old * (1 - momenta[norm]) + new * momenta[norm]
                tl.store(running_variances[norm] + c, new, held)
