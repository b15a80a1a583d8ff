"""Exchange of a step's arrays with ranks that only score (`--scorer_ranks`)."""

from collections.abc import Sequence

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.metrics.timer import Timers
from mindrlhf.model_roles import Role
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.types import Experience, with_missing


class Exchange:
    """Exchange of a job in which no rank only scores: nothing moves."""

    def with_scores(self, own: list[Experience]) -> list[Experience]:
        """Bring the values of each token to the ranks that train.

        own: this rank's experiences; on ranks that score, with these values.
        """
        return own

    def with_returns(self, own: list[Experience]) -> list[Experience]:
        """Bring the returns to the ranks that score, if a model there trains.

        own: this rank's experiences; on ranks that train, with the returns.
        """
        return own


class ScoredApart(Exchange):
    """Exchange on a rank that trains or only scores.

    Both sides have a step's experiences of all ranks in the same order. roles: those on the ranks that score. train,
    score: the ranks of both sides. data_parallel: this rank's axis on its side. timers: count what it waits.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        train: Sequence[int],
        score: Sequence[int],
        collectives: Collectives,
        data_parallel: DataParallel,
        timers: Timers,
    ):
        self._timers = timers
        self._collectives = collectives.over(sorted([*train, *score]))
        self._data_parallel = data_parallel
        self._scores = collectives.world.rank in score
        self._first_scorer, self._first_trainer = score[0], train[0]
        self._names = [role.scoring.array for role in roles]
        self._trains = any(role.training for role in roles)

    def with_scores(self, own: list[Experience]) -> list[Experience]:
        return self._brought(own, self._names, self._first_scorer, tells=self._scores)

    def with_returns(self, own: list[Experience]) -> list[Experience]:
        names = ["returns"] if self._trains else []
        return self._brought(own, names, self._first_trainer, tells=not self._scores)

    def _brought(self, own: list[Experience], names: Sequence[str], root: int, tells: bool) -> list[Experience]:
        """Bring arrays of all experiences from one side to the other.

        root: a rank of the side that has them. tells: this rank is on that side.
        """
        if not names:
            return own
        every = None
        if tells:
            every = self._data_parallel.united([{name: e.tokens[name] for name in names} for e in own])
        with self._timers("wait"):
            every = self._collectives.broadcast_object(every, root)
        if tells:
            return own
        arrays = self._data_parallel.share(every)
        for name in names:
            own = with_missing(own, name, [rows[name] for rows in arrays])
        return own
