"""Memories of every kind for one text, number by number: as slow and as plain as their formulas.

Each function returns what attention reads from the tokens (None in feed-forward kinds), the
coefficients m "position memory" and y "position hidden". Experts have the router's weights
"position expert" in place of m.
"""

import math

import torch


def softmax(scores):
    weights = [score.exp() for score in scores]
    return [weight / sum(weights) for weight in weights]


def weighted(weights, vectors):
    return sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))


def by_head(matrix, n_heads):
    """The rows of a projection that belong to each head."""
    return matrix.chunk(n_heads)


def feed_forward(memory, x, f):
    m = [
        torch.stack(
            [f(k @ one + b) for k, b in zip(memory.keys.weight, memory.keys.bias, strict=True)]
        )
        for one in x
    ]
    y = [weighted(row, memory.values.weight.T) + memory.values.bias for row in m]
    return None, torch.stack(m), torch.stack(y)


def relu(memory, x):
    return feed_forward(memory, x, lambda z: z if z > 0 else 0 * z)


def gelu(memory, x):
    return feed_forward(memory, x, lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2)


def swiglu(memory, x):
    pairs = list(zip(memory.keys.weight, memory.up.weight, strict=True))
    m = [
        torch.stack([(k @ one) / (1 + (-k @ one).exp()) * (u @ one) for k, u in pairs]) for one in x
    ]
    return None, torch.stack(m), torch.stack([weighted(row, memory.values.weight.T) for row in m])


def softmax_memory(memory, x):
    values = [math.sqrt(len(memory.values.weight)) * row for row in memory.values.weight]
    m = [torch.stack(softmax([k @ one for k in memory.keys.weight])) for one in x]
    return None, torch.stack(m), torch.stack([weighted(row, values) for row in m])


def persistent(memory, x):
    heads, slots = memory.keys.n_heads, memory.keys.n_slots
    width = x.shape[1] // heads
    out = memory.values.out.weight.chunk(heads, dim=1)
    m_k = [math.sqrt(width) * one for one in memory.keys.weight.chunk(heads)]
    m_v = [math.sqrt(slots) * one for one in memory.values.weight.chunk(heads)]
    w_q = by_head(memory.keys.query.weight, heads)
    w_k, w_v = by_head(memory.k_proj.weight, heads), by_head(memory.v_proj.weight, heads)
    from_tokens, coefficients, from_slots = [], [], []
    for t in range(len(x)):
        tokens, slot_part, m = 0, 0, []
        for h in range(heads):
            q = w_q[h] @ x[t]
            keys = [w_k[h] @ x[c] for c in range(t + 1)] + list(m_k[h])
            a = softmax([q @ key / math.sqrt(width) for key in keys])
            tokens = tokens + out[h] @ weighted(a[: t + 1], [w_v[h] @ x[c] for c in range(t + 1)])
            slot_part = slot_part + out[h] @ weighted(a[t + 1 :], m_v[h])
            m += a[t + 1 :]
        from_tokens.append(tokens)
        coefficients.append(torch.stack(m))
        from_slots.append(slot_part)
    return torch.stack(from_tokens), torch.stack(coefficients), torch.stack(from_slots)


def lambda_layer(memory, x):
    heads, distances = memory.keys.n_heads, memory.keys.n_distances
    out = memory.values.out.weight.chunk(heads, dim=1)
    static = [one / math.sqrt(distances) for one in memory.keys.weight.chunk(heads)]
    w_q = by_head(memory.keys.query.weight, heads)
    k = [memory.k_proj.weight @ one for one in x]
    v = [memory.v_proj.weight @ one for one in x]
    content, coefficients, positional = [], [], []
    for n in range(len(x)):
        # λᶜ, a row for each number of a key: the values, averaged by that number's softmax
        shares = [softmax([k[m][j] for m in range(n + 1)]) for j in range(len(k[0]))]
        said = torch.stack([weighted(share, v[: n + 1]) for share in shares])
        of_tokens, of_places, row = 0, 0, []
        for h in range(heads):
            q = w_q[h] @ x[n]
            of_tokens = of_tokens + out[h] @ (q @ said)
            for distance in range(distances):
                there = distance <= n
                m = q @ static[h][distance] if there else 0 * q.sum()
                of_places = of_places + out[h] @ (m * v[n - distance if there else n])
                row.append(m)
        content.append(of_tokens)
        coefficients.append(torch.stack(row))
        positional.append(of_places)
    return torch.stack(content), torch.stack(coefficients), torch.stack(positional)


def experts(memory, x):
    """Each expert by itself, as a feed-forward layer; those of largest probability count."""
    stacks = memory.experts
    weights, y = [], []
    for one in x:
        p = softmax([row @ one for row in memory.router.weight])
        chosen = sorted(range(len(p)), key=lambda e: -p[e])[: memory.router.n_choices]
        total = sum(p[e] for e in chosen)
        weights.append(
            torch.stack([p[e] / total if e in chosen else 0 * p[e] for e in range(len(p))])
        )
        output = 0 if memory.shared_expert is None else relu(memory.shared_expert, one[None])[2][0]
        for e in chosen:
            scores = [
                k @ one + b for k, b in zip(stacks.up_proj[e], stacks.up_proj_bias[e], strict=True)
            ]
            m = [score if score > 0 else 0 * score for score in scores]
            bias = stacks.down_proj_bias[e]
            output = output + p[e] / total * (weighted(m, stacks.down_proj[e].T) + bias)
        y.append(output)
    return None, torch.stack(weights), torch.stack(y)


PLAIN = {
    "relu": relu,
    "gelu": gelu,
    "swiglu": swiglu,
    "softmax": softmax_memory,
    "persistent": persistent,
    "lambda": lambda_layer,
    "moe": experts,
}
