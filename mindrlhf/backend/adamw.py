"""AdamW's two graphs as compositions of MindSpore's operators."""

from mindspore import ops


def squared_norm(gradients):
    """Sum the squares of all gradients to a float32 scalar."""
    parts = ()
    for gradient in gradients:
        parts += (ops.square(gradient).sum(),)
    return ops.stack(parts).sum()


def adamw(parameters, gradients, first, second, decays, rows, numbers):
    """Update all parameters and moments in place; zero the gradients.

    decays: for each parameter, True if weight decay applies. rows: (first, end) of those rows of each gradient that
    belong to the parameter. numbers: six float32 scalars, rate, beta1, beta2, epsilon, decay, and the factor of the
    gradients. Computed is w -= rate * (m / (sqrt(v) + epsilon) + decay * w), without a correction of the moments'
    bias.
    """
    rate, beta1, beta2, eps, decay, scale = numbers
    done = rate
    for i in range(len(parameters)):
        gradient = gradients[i]
        start, end = rows[i]
        own = gradient if end - start == gradient.shape[0] else gradient[start:end]
        step = ops.AdamWeightDecay()(
            parameters[i],
            first[i],
            second[i],
            rate,
            beta1,
            beta2,
            eps,
            decay if decays[i] else decay * 0.0,
            own * scale,
        )
        done = ops.depend(done, step)
        # g - g, because zeros would be folded into the graph as constants: the size of the model once more. The
        # gradients are finite here.
        done = ops.depend(done, ops.assign_sub(gradient, ops.depend(gradient, step)))
    return done
