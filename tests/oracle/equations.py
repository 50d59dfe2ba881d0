"""Duration and energy of one step, as the coefficients give them."""


def t_pre(c: dict, n: float, b: float, s2: float) -> float:
    """Seconds of a prefill step over n new tokens in b pieces, s2 = sum((c_i + n_i)^2 - c_i^2)."""
    if c.get("form") == "piecewise":
        return _rise(n, c["tok_knots"], c["tok_slopes"]) + c["b0"] + c["b1"] * b + c["b2"] * s2
    if c.get("form") == "table":
        return _interpolated(c["n_tokens"], c["seq_len"], c["time_s"], n, s2 / n if n else 0.0)
    knee = c["tok_knee"]
    return c["tok_slope_below"] * min(n, knee) + c["tok_slope_above"] * max(n - knee, 0.0) + c["b0"] + c["b1"] * b + c["b2"] * s2


def t_dec(c: dict, b: float, k: float) -> float:
    """Seconds of a decode step over b requests with k cached tokens together."""
    mean_context = k / b
    if c.get("form") == "piecewise":
        return c["alpha0"] + _rise(b, c["batch_knots"], c["batch_slopes"]) + (c["beta0"] + c["beta1"] * b) * mean_context
    if c.get("form") == "table":
        return _interpolated(c["batch"], c["mean_ctx"], c["time_s"], b, mean_context)
    a0 = c["alpha0"] + c["beta0"] * mean_context
    a1 = c["alpha1"] + c["beta1"] * mean_context
    a2 = c["alpha2"] + c["beta2"] * mean_context
    return a0 + a1 * b + a2 * (b * b)


def _rise(x: float, knots: list[float], slopes: list[float]) -> float:
    """From 0 at 0, piece by piece."""
    total, at = 0.0, 0.0
    for end, slope in zip([*knots, float("inf")], slopes, strict=True):
        total += slope * (min(x, end) - at)
        if x <= end:
            break
        at = end
    return total


def _interpolated(xs: list[float], ys: list[float] | None, grid: list, x: float, y: float) -> float:
    """In x on both edges of the cell, then between them in y; the outermost cells go on."""
    if ys is None:
        return _line(xs, [float(value) for value in grid], x)
    return _line(ys, [_line(xs, [row[j] for row in grid], x) for j in range(len(ys))], y)


def _line(xs: list[float], values: list[float], x: float) -> float:
    i = 0
    while i < len(xs) - 2 and x >= xs[i + 1]:
        i += 1
    return values[i] + (values[i + 1] - values[i]) * (x - xs[i]) / (xs[i + 1] - xs[i])


def e_pre(c: dict, n: float, s2: float) -> float:
    """Joules that a prefill step asks for."""
    return c["e_pre0"] + c["e_pre_tok"] * n + c["e_pre_sq"] * s2


def e_fix(c: dict, b: float) -> float:
    """Joules of a decode step over b requests that they share; a world without a knee has no names for it."""
    return c["e_dec0"] + (c.get("e_dec_req_below", 0.0) - c["e_dec_req"]) * min(b, c.get("batch_knee", 0.0))


def e_dec(c: dict, b: float, k: float) -> float:
    """Joules that a decode step asks for."""
    return e_fix(c, b) + c["e_dec_req"] * b + c["e_dec_kv"] * k


def drawn_j(asked: float, t: float, idle_w: float, max_w: float) -> float:
    """Joules that a step of t seconds takes: no less than idling, no more than the boards can draw."""
    if asked < idle_w * t:
        return idle_w * t
    return min(asked, max_w * t)
