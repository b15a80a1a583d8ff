"""The coefficient of a KL penalty, constant or steered towards a target."""


class FixedKLController:
    """Constant KL coefficient. coefficient: per nat."""

    def __init__(self, coefficient: float):
        self.coefficient = coefficient

    def update(self, kl: float, samples: int) -> None:
        """Ignore the KL; the arguments are those of `AdaptiveKLController.update`."""


class AdaptiveKLController:
    """KL coefficient steered towards a target KL (Ziegler et al. 2019).

    It grows while the KL is above the target and shrinks below it.
    coefficient: the first value, and the state to save for a resumed run.
    target: the wished KL, in nats, of the same kind as the argument of `update`.
    horizon: in samples; an update on n samples changes the coefficient by at most 0.2 * n / horizon of itself.
    """

    def __init__(self, coefficient: float, target: float, horizon: int):
        if target <= 0 or horizon <= 0:
            raise ValueError(f"an adaptive KL coefficient needs target > 0 and horizon > 0, got {target} and {horizon}")
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to a step's mean `kl`.

        kl: in nats. samples: number of sequences over all ranks.
        """
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * samples / self.horizon
