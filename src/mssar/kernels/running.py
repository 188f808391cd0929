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
    reduces,  # Ω₁ of the norms from FIRST on, where their means lack what comes
    offsets,  # of these numbers, one a channel of Ω₁
    C,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for norm in tl.static_range(len(means)):
        if (tl.program_id(0) == norm) & (tl.program_id(1) * BLOCK < widths[norm]):
            held = c < widths[norm]
            # All at once: what has been asked for is waited for together.
            new = tl.load(means[norm] + c, held, 0.0)
            variance = tl.load(variances[norm] + c, held, 0.0)
            old = tl.load(running_means[norm] + c, held, 0.0).to(tl.float32)
            old_variance = tl.load(running_variances[norm] + c, held, 0.0).to(tl.float32)
            if tl.program_id(1) == 0:
                tl.store(counts[norm], tl.load(counts[norm]) + 1)
            if norm >= FIRST and norm < FIRST + len(reduces):
                for start in range(0, C, BK):
                    k = start + tl.arange(0, BK)
                    mask = held[:, None] & (k < C)[None, :]
                    w = tl.load(reduces[norm - FIRST] + c[:, None] * C + k[None, :], mask, 0.0)
                    offset = tl.load(offsets + k, k < C, 0.0).to(tl.float32)
                    new += tl.sum(w.to(tl.float32) * offset[None, :], 1)
            new = old * (1 - momenta[norm]) + new * momenta[norm]
            tl.store(running_means[norm] + c, new, held)
            unbiased = values[norm] / (values[norm] - 1.0)
            new = old_variance * (1 - momenta[norm]) + variance * unbiased * momenta[norm]
            tl.store(running_variances[norm] + c, new, held)
