"""Names of the KL estimators, which settings are checked with before MindSpore is imported."""

from mindrlhf.algorithms.methods import unknown_name

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "low_var_kl")
STRAIGHT_THROUGH = "+"  # at the end of a name


def check_kl_estimator(name: str) -> str:
    """Return an estimator's name without a `+`; UserError if unknown."""
    plain = name.removesuffix(STRAIGHT_THROUGH)
    if plain not in KL_ESTIMATORS:
        raise unknown_name("KL estimator", name, [*KL_ESTIMATORS, *(f"{known}+" for known in KL_ESTIMATORS)])
    return plain
