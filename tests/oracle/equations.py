"""Duration and energy of one step, as the coefficients give them."""


def t_pre(c: dict, n: float, b: float, s2: float) -> float:
    """Seconds of a prefill step over n new tokens in b pieces, s2 = sum((c_i + n_i)^2 - c_i^2)."""
    knee = c["tok_knee"]
    return c["tok_slope_below"] * min(n, knee) + c["tok_slope_above"] * max(n - knee, 0.0) + c["b0"] + c["b1"] * b + c["b2"] * s2


def t_dec(c: dict, b: float, k: float) -> float:
    """Seconds of a decode step over b requests with k cached tokens together."""
    mean_context = k / b
    a0 = c["alpha0"] + c["beta0"] * mean_context
    a1 = c["alpha1"] + c["beta1"] * mean_context
    a2 = c["alpha2"] + c["beta2"] * mean_context
    return a0 + a1 * b + a2 * (b * b)


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
